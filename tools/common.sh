# Functions of the scripts in this folder.

# bounded SECONDS COMMAND…: runs a command with a time limit, which includes compilation. Cargo cannot use make's job
# server, and would print a warning for each crate with examples in its docs.
bounded() {
  env -u MAKEFLAGS -u MFLAGS python tests/package/bounded.py "$@"
}
