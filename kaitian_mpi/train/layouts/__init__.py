"""How a model and its optimizers are laid out over the ranks: a folder or file a layout."""
