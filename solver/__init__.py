"""Pure planning: which groups to form and which sequences each gets. Imports neither ray nor torch."""
