# Shared by the commands of this folder.

# Runs a command for at most a number of seconds, compilation included: bounded SECONDS COMMAND… Cargo cannot read
# make's list of jobs, and would say so for each crate with examples in its docs.
bounded() {
  env -u MAKEFLAGS -u MFLAGS python tests/package/bounded.py "$@"
}
