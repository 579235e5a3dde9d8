"""Pure planning: which groups form and which sequences each gets. Imports neither ray nor torch."""
