"""Hidden checks of the labs, a package for each lab. The hidden tests of the notebooks call them; students never see them."""
