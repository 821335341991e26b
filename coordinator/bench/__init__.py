"""`titan bench …`: measurements that compare variants within one run and print ratios."""
