# What the commands of this folder share.

# Runs a command for a number of seconds at most, what is compiled included: bounded SECONDS COMMAND… Cargo cannot read
# make's own list of jobs, and would say so for each crate with examples in its docs.
bounded() {
  env -u MAKEFLAGS -u MFLAGS python tests/package/bounded.py "$@"
}
