"""Images: where they come from, who gets them, and how they are seen."""
