//! The `farside` command. All of it is in `cli`, which uses the public library and nothing else.

mod cli;

fn main() -> std::process::ExitCode {
    cli::main()
}
