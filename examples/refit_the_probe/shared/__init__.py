"""What the recipes of this folder share: settings, models, runs, measurements, rows, claims."""
