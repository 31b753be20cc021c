"""What a reader runs around the core; the core imports nothing from here."""
