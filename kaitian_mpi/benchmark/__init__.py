"""What each rank costs: timing the user's model, and the plan that follows from it."""
