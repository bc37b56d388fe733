"""Ways of learning, one folder each. The rest of the program knows two base classes and no method by name.

A folder ``methods/<name>/`` holds

- ``keys.py``, without torch: the dataclass of the loss's keys, those of heads that belong to the method, and a
  ``MethodSpec`` with what it infers from the rest of the recipe, its rules, and its row of ``docs/methods.md``;
- ``method.py``: the mathematics as functions of outputs, the method's own heads if any, and the ``Method``
  (registered in LOSSES under the name that a recipe writes as ``LOSS.name``): what student and teacher see, the loss,
  figures, collapse.

Adding one is that folder, a line in ``registry.METHODS``, a recipe ``digits/<name>`` and a test. Pieces that several
methods share lie beside the folders: ``gather`` (differentiable, over ranks), ``sinkhorn``, ``queue``, ``health``,
``masks`` (which patches are hidden).

A loss of your own subclasses ``Method`` and registers in LOSSES alone; a ``MethodSpec`` is for built-in ones.
"""
