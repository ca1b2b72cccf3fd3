"""The phases of a run, named once: heartbeats, deadlines and fault points go by them."""

START = "start"  # joining the others, reading data, making or restoring the state
COMPILE = "compile"
STEP = "step"  # waiting for its input, running it, logging it
EVALUATION = "evaluation"
SAVE = "save"  # starting to save, and waiting for what is saved in the background
END = "end"  # everything is saved: summary, report, leaving

PHASES = (START, COMPILE, STEP, EVALUATION, SAVE, END)

INPUT = "input"  # in the thread that makes batches: a fault point, beside the phases
