"""Colors by name, for charts and page, light and dark.

Every series has a marker of its own too. Colors have a contrast of at least 3:1 on their background
(text 4.5:1) and differ in brightness, so that color-blind readers can tell them apart.
"""

LIGHT = {
    "page": "#f6f7f9",
    "card": "#ffffff",
    "ink": "#1a1f26",
    "muted": "#57606b",
    "rule": "#dde1e6",
    "none": "#6c7480",
    "eagle3": "#b45309",
    "p-eagle": "#1f5fd0",
    "s0": "#0b8f86",
    "s1": "#2f74e6",
    "s2": "#4a2a9c",
    "s3": "#c6367d",
    "s4": "#7a6a00",
    "s5": "#0a5a73",
}
DARK = {
    "page": "#0e1217",
    "card": "#171c23",
    "ink": "#e9edf2",
    "muted": "#a4adb9",
    "rule": "#303843",
    "none": "#9aa4b1",
    "eagle3": "#ffb155",
    "p-eagle": "#7db3ff",
    "s0": "#41cdbf",
    "s1": "#6ea8ff",
    "s2": "#c9b5ff",
    "s3": "#ff86bb",
    "s4": "#e2cd55",
    "s5": "#8fd3ee",
}
SERIES_COLORS = ("s0", "s1", "s2", "s3", "s4", "s5")
MARKERS = {
    "s0": "o",
    "s1": "s",
    "s2": "D",
    "s3": "^",
    "s4": "v",
    "s5": "P",
    "ink": "*",
    "eagle3": "X",
    "none": "o",
}


def css_variables(colors: dict[str, str]) -> str:
    return "".join(f"--{name}:{value};" for name, value in colors.items())
