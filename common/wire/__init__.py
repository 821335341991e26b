"""What coordinator and worker say to each other, as values, and its encoding."""
