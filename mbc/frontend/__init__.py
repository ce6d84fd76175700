"""Source text -> syntax tree -> Network: `parse`, then `lower`. grammar/LANGUAGE.md teaches the language."""
