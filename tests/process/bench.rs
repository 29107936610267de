//! `farside bench` as its users see it: figures for people and for scripts, the processors of both ends, the live line.

use std::process::{Command, Output};

use crate::served::{NQN, Served, own_address};
use crate::skipped::skipped;

fn served() -> Served {
    Served::start("reactors = 1\nreceive_slots = 512\npool_size = \"8M\"")
}

/// What all of these runs have in common.
fn arguments(served: &Served, more: &str) -> Vec<String> {
    let (address, source) = (served.address, own_address());
    let common = format!("--log warn bench {address} --provider soft --source {source} --nqn {NQN} {more}");
    common.split(' ').map(str::to_owned).collect()
}

fn bench(served: &Served, more: &str) -> String {
    let Output { status, stdout, stderr } =
        Command::new(env!("CARGO_BIN_EXE_farside")).args(arguments(served, more)).output().expect("the program");
    let (stdout, stderr) = (String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
    assert!(status.success(), "{more}: {status}\n{stdout}{stderr}\n{}", served.log());
    // The live line is for terminals.
    assert!(!stderr.contains('\x1b'), "{stderr:?}");
    stdout.into_owned()
}

#[test]
fn bench_tells_scripts_what_it_did_at_both_ends() {
    let served = served();
    let text = bench(&served, "--rw rw --rwmixread 70 --numjobs 2 --iodepth 4 --bs 4K --runtime 1.5 --json");
    let json: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let number = |pointer: &str| {
        json.pointer(pointer).and_then(serde_json::Value::as_f64).unwrap_or_else(|| panic!("no {pointer} in {text}"))
    };
    let (reads, writes) = (number("/read/operations"), number("/write/operations"));
    assert!(reads + writes > 200.0, "{text}");
    // Of n draws with 70 to 30 the share is within five standard deviations.
    let (share, slack) = (reads / (reads + writes), 5.0 * (0.7 * 0.3 / (reads + writes)).sqrt());
    assert!((share - 0.7).abs() <= slack, "{share} of the operations are reads");
    let seconds = number("/elapsed_ns") / 1e9;
    assert!((1.4..10.0).contains(&seconds), "{seconds} s");
    assert!((number("/iops") * seconds - reads - writes).abs() < 1.0, "{text}");
    for side in ["/read", "/write"] {
        let at = |name: &str| number(&format!("{side}{name}"));
        assert_eq!((at("/errors"), at("/bytes")), (0.0, at("/operations") * 4096.0), "{text}");
        let latency = |name: &str| at(&format!("/latency_ns/{name}"));
        let rising = ["min", "percentile/50", "percentile/99", "percentile/99.9", "max"].map(latency);
        assert!(rising.is_sorted() && rising[0] > 0.0, "{side}: {rising:?}");
        assert!((rising[0]..=rising[4]).contains(&latency("mean")), "{text}");
    }
    assert_eq!(number("/target_pid"), f64::from(served.pid()));
    // Neither end did nothing, and each has a few threads at most.
    for end in ["/cpu_ns", "/target_cpu_ns"] {
        assert!((0.02..6.0).contains(&(number(end) / 1e9 / seconds)), "{end}: {text}");
    }
}

#[test]
fn bench_tells_people_what_it_did_at_both_ends() {
    let served = served();
    let text = bench(&served, "--rw randread --iodepth 8 --runtime 1");
    let line = |start: &str| {
        text.lines().find(|line| line.trim_start().starts_with(start)).unwrap_or_else(|| panic!("no {start} in {text}"))
    };
    assert!(line("read").contains(" IOPS ") && line("read").contains(" MiB/s "), "{text}");
    let latencies = line("us:");
    let after = |name: &str| -> f64 {
        let rest = latencies.split_once(&format!(" {name} ")).unwrap_or_else(|| panic!("no {name} in {text}")).1;
        rest.split(' ').next().and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("{name} in {text}"))
    };
    let rising = ["p50", "p99", "p99.9", "max"].map(after);
    assert!(rising.is_sorted() && rising[0] > 0.0, "{text}");
    assert!((0.0..=rising[3]).contains(&after("avg")), "{text}");
    let time = line("time");
    assert!(time.contains("% of a processor here"), "{text}");
    assert!(time.contains(&format!("of the target (process {}) ", served.pid())), "{text}");
}

#[test]
fn bench_shows_its_progress_on_a_terminal() {
    let served = served();
    let words = arguments(&served, "--rw randread --iodepth 8 --runtime 2");
    let command = format!("{} {}", env!("CARGO_BIN_EXE_farside"), words.join(" "));
    let output = match Command::new("script").args(["-qec", &command, "/dev/null"]).output() {
        Ok(output) => output,
        Err(error) => return skipped(&format!("there is no script program (util-linux): {error}")),
    };
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}");
    // One line, written anew, that is gone in the end.
    let shown: Vec<&str> = text.split("\r\x1b[K").collect();
    let live = shown.iter().filter(|line| line.contains(" s  read ") && line.contains("MiB/s")).count();
    assert!(live >= 3, "{live} live lines in {text:?}");
    assert!(shown.iter().rev().skip(1).all(|line| !line.contains('\n')), "{text:?}");
    assert!(shown.last().is_some_and(|rest| rest.contains("IOPS")), "{text:?}");
}
