"""From a recipe to a released model."""
