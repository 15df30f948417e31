"""How tasks draw words, walks and pairs."""
