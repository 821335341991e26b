"""Reading experts before the router asks for them."""
