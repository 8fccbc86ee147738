"""The visible checks of the labs, a package or a module for each: what their test cells call."""
