"""Hidden checks of the labs, one module a lab. A notebook's hidden tests call them; students never see them."""
