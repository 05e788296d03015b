"""lowbit inside of other libraries. Only their users import these modules."""
