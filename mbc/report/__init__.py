"""What commands print: text and JSON of plans, profiles and results. Nothing here decides anything."""
