"""Questions and passages: HotpotQA, and the generated miniature."""
