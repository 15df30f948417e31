"""The one engine that runs interventions."""
