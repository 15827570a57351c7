"""The target answers the prompts itself: what a drafter is trained on must be the target's own words."""
