"""Ways of learning, two files for each family. The rest of the program knows two base classes and no method by name.

For a family of methods, such as ``swav``,

- ``swav_keys.py``, without torch, holds the dataclass of each loss's keys, those of the method's own heads, and a
  ``MethodSpec`` with what it infers from the rest of the recipe, its rules, and its row of ``docs/methods.md``;
- ``swav.py`` holds the mathematics as functions of outputs, the method's own heads if any, and the ``Method``
  (registered in LOSSES under the name that a recipe writes as ``LOSS.name``): what student and teacher see, the loss,
  figures, collapse.

To add one, write it into the family that it belongs to, or into two new files; add a line to ``registry.METHODS``, a
recipe ``digits/<name>`` and a test. Pieces that several methods share: ``gather`` (differentiable sums over ranks,
Sinkhorn, the queue of embeddings), ``health``, ``mixing``; and in ``models/patches``, which patches are hidden.

A loss of your own subclasses ``Method`` and registers in LOSSES alone; a ``MethodSpec`` is for built-in ones.
"""
