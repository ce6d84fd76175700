"""Operations, one file a family."""
