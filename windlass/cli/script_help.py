"""Help text of the argument SCRIPT of commands that run a training script."""

SCRIPT_HELP = (
    "A training script and its arguments. Options of this command may be anywhere before --; all words after -- belong "
    "to the script."
)
