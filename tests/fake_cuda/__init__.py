"""Steps of training on a CUDA device that does not exist: fake tensors, a fake process group, no GPU."""
