"""Results that a command remakes, each a module with

    run(**options) -> dict          figures, ready for JSON; of the options of `dpformer reproduce` it takes those that it names;
                                    also `say(line)` to tell how far it is, and `out`, a file to draw its figure to
    show(figures) -> str | Table    for people
    markdown(figures) -> str        optional: the page that is committed beside the figures

They are looked up by name, so that asking for one imports only that one.
"""

RESULTS: dict[str, str] = {
    "error-table": "dpformer.experiments.reproduce.error_table",
    "attention": "dpformer.experiments.reproduce.attention",
    "transitions": "dpformer.experiments.reproduce.transitions",
    "whole": "dpformer.experiments.reproduce.whole",
}
