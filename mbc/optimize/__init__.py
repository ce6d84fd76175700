"""From a training graph to a plan. Packages, lowest first (each imports only those above it and itself):

candidates      which kernels can run each operation
fusion          which operations run as one launch
selection       one kernel, layout and division for every operation
schedule        launches, their order, streams and waits; what is live when; the predicted time
placement       an address for every buffer
remat           what is kept, recomputed or offloaded
bounds          what no plan can beat
search          the loop over all of them
"""
