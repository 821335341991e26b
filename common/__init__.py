"""What coordinator and worker share. Knows neither of them."""
