"""LSTM, GRU and RNN as cuDNN runs them."""
