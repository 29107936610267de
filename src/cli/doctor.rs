//! `farside doctor`: what keeps RDMA from working here, and what a host's messages mean.

use std::io::{BufRead, stdin};
use std::net::IpAddr;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use farside::ProviderChoice;
use farside::config::Options;
use farside::doctor::{Doctor, SECCOMP_PROFILE, Severity, decode};

#[derive(Debug, Args)]
pub(crate) struct DoctorArguments {
    /// The address that a target listens on, or is to
    #[arg(long, value_name = "ADDR")]
    listen: Option<IpAddr>,
    /// The address of a host, to look at the way there
    #[arg(long, value_name = "ADDR")]
    peer: Option<IpAddr>,
    /// What is to be used: what is missing for it is a fault
    #[arg(long, default_value = "auto")]
    provider: ProviderChoice,
    /// Say what lines of a host's kernel log mean, read from standard input (dmesg | farside doctor --decode)
    #[arg(long, exclusive = true)]
    decode: bool,
    /// Print a seccomp profile that lets farside run in a container (docker run --security-opt seccomp=FILE)
    #[arg(long, exclusive = true)]
    seccomp_profile: bool,
}

impl DoctorArguments {
    pub(crate) fn run(self) -> ExitCode {
        if self.decode {
            return explain();
        }
        if self.seccomp_profile {
            print!("{SECCOMP_PROFILE}");
            return ExitCode::SUCCESS;
        }
        let reactors = std::thread::available_parallelism().map_or(1, |cores| cores.get() as u64);
        let doctor = Doctor {
            root: PathBuf::from("/"),
            address: self.listen,
            peer: self.peer,
            memory: Options::default().registered_memory() * reactors,
            verbs: self.provider == ProviderChoice::Verbs,
        };
        let findings = doctor.examine();
        for finding in &findings {
            println!("{finding}");
        }
        if findings.iter().any(|finding| finding.severity == Severity::Fault) {
            ExitCode::FAILURE
        } else {
            ExitCode::SUCCESS
        }
    }
}

fn explain() -> ExitCode {
    let mut known = 0;
    for line in stdin().lock().lines().map_while(Result::ok) {
        if let Some(meaning) = decode(&line) {
            known += 1;
            println!("{line}\n    {}; {}", meaning.meaning, meaning.remedy);
        }
    }
    if known == 0 {
        println!("no line that is known here");
    }
    ExitCode::SUCCESS
}
