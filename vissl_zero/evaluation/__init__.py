"""Measures of trained features: kNN, linear classifiers, retrieval, clustering, segmentation, files."""
