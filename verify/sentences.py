"""The sentences that `python -m verify real` encodes as one batch, from one word to about 120 (our own)."""

# Pairs (0, 1), (2, 3), (4, 5) and (6, 7) say the same thing twice; the rest stand alone.
SENTENCES = (
    "The bakery on the corner opens before sunrise.",
    "Long before the sun is up, the corner bakery has already unlocked its door.",
    "A leaking tap wastes more water in a week than you would expect.",
    "You would be surprised how much water a dripping faucet loses in seven days.",
    "She tuned the old piano by ear.",
    "Without any instrument but her own hearing, she brought the ageing piano back into tune.",
    "The ferry was cancelled because of the storm.",
    "Bad weather kept the boat in the harbour that day.",
    "Rust.",
    "Why?",
    "Prime numbers thin out slowly.",
    "Please return the ladder to the shed when you have finished with it, and lock the gate.",
    "The committee met for three hours, changed one comma in the second paragraph, and postponed everything else "
    "until the autumn.",
    "A kernel that reads one row too many usually works for years, because the row behind the last one happens to "
    "hold zeros; then somebody changes an allocator and the same program returns nonsense on a Tuesday.",
    "On the first morning we walked down to the lake while it was still grey, and found that the ice had already let "
    "go of the northern shore. My brother threw a stone, which skipped twice and then slid, and for a while nobody "
    "said anything. Later there was coffee from a dented flask, a long argument about which of the two islands our "
    "grandfather had rowed to as a boy, and a heron that stood so still in the reeds that we took it for a post until "
    "it opened its wings and left, low over the water, as if it had somewhere to be. None of us had brought a camera, "
    "and I think that is why I remember it.",
    "Tides follow the moon, but harbours answer to their own shape.",
)
