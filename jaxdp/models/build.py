"""From a model's name and options to two pure functions."""



