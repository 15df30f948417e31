"""One forward pass while hooks are in place: where examples and positions are in what a module is called with."""
