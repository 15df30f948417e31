"""Recipes that ``probelens run NAME`` runs; each is a short linear script meant to be copied and changed."""
