//! Tests that the tables in the documents name exist, and what stands in a file is compiled.

use std::fs;
use std::path::{Path, PathBuf};

use farside::target::Cause;

/// Documents, and how many tests each names at least.
const DOCUMENTS: [(&str, usize); 3] = [("README.md", 0), ("tests/FEATURES.md", 80), ("tests/FIELD-REPORTS.md", 80)];

fn sources(folder: &Path, found: &mut Vec<(String, String)>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path: PathBuf = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|ext| ext == "rs" || ext == "py") {
            found.push((path.display().to_string(), fs::read_to_string(&path).unwrap()));
        }
    }
}

/// What stands between backticks.
fn quoted(text: &str) -> impl Iterator<Item = &str> {
    // Blocks of code have three of them.
    text.split("```").step_by(2).flat_map(|prose| prose.split('`').skip(1).step_by(2))
}

/// Whether a file has a function of this name that is a test: by an attribute, as a scenario, or as a case.
fn has(text: &str, name: &str) -> bool {
    let starts = [format!("fn {name}("), format!("fn {name}<"), format!("def {name}(")];
    starts.iter().any(|start| text.contains(start.as_str()))
}

#[test]
fn every_test_that_a_table_names_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    for folder in ["src", "nvme/src", "tests"] {
        sources(&root.join(folder), &mut files);
    }
    let word = |name: &str| name.bytes().all(|byte| byte == b'_' || byte.is_ascii_alphanumeric());
    let mut missing = Vec::new();
    for (document, least) in DOCUMENTS {
        let text = fs::read_to_string(root.join(document)).unwrap();
        let mut count = 0;
        for name in quoted(&text) {
            let found = match name.split_once("::") {
                // A path of Rust, not of a test.
                Some((file, _)) if !file.ends_with(".rs") && !file.ends_with(".py") => continue,
                Some((file, name)) => {
                    let file = format!("/{file}");
                    files.iter().any(|(path, text)| path.ends_with(&file) && has(text, name))
                }
                // Metrics have names as long as those of tests.
                None if name.starts_with("farside_") => continue,
                None if name.len() > 20 && word(name) && name.matches('_').count() > 2 => {
                    files.iter().any(|(_, text)| has(text, name))
                }
                None => continue,
            };
            count += 1;
            if !found {
                missing.push(format!("{document}: {name}"));
            }
        }
        assert!(count >= least, "only {count} tests are named in {document}: the search is broken");
    }
    assert!(missing.is_empty(), "not there:\n{}", missing.join("\n"));
}

#[test]
fn every_row_of_the_features_has_a_test_or_a_reason() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let text = fs::read_to_string(root.join("tests/FEATURES.md")).unwrap();
    let rows = text.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| feature"));
    let mut count = 0;
    for row in rows {
        count += 1;
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        let &[_, ours, _, _, test] = cells.as_slice() else { panic!("not five cells: {row}") };
        match ours.strip_prefix("no") {
            Some(reason) => assert!(reason.starts_with(": ") && test.is_empty(), "no reason: {row}"),
            None => assert!(test.starts_with('`'), "no test: {row}"),
        }
    }
    assert!(count > 80, "only {count} rows");
}

/// Causes of a queue's end that no test of the whole target provokes, and why.
const UNPROVOKED: [(Cause, &str); 10] = [
    (
        Cause::ConnectionLost,
        "a device's word of its own, or a failed post: the in-process and the software provider have neither",
    ),
    (Cause::LocalLength, "a buffer of ours that is too short: a fault of the target, which has none that is known"),
    (Cause::LocalProtection, "a key of ours that is wrong: a fault of the target, which has none that is known"),
    (
        Cause::RemoteInvalidRequest,
        "a host whose receives are too short for a response, or that gives fewer READs than it said: there is none here",
    ),
    (Cause::RemoteOperation, "a host whose receives are in memory that its device does not know: there is none here"),
    (Cause::Flushed, "follows from a failure that tells more, and is replaced by it"),
    (Cause::OtherStatus, "a status that only some devices have"),
    (
        Cause::AuthenticationTimedOut,
        "two minutes: `authenticate.rs::host_that_takes_too_long_loses_its_controller` has the clock",
    ),
    (Cause::Transport, "a call of the registry that the RDMA transport never makes"),
    (Cause::TargetStops, "nobody is left to ask: it is in the log"),
];

/// Whether a line asserts that a queue ended for this cause: by the helpers that wait until that is counted, or by an equality.
/// That there was none asserts nothing, nor does a comment.
fn asserts(line: &str, cause: Cause) -> bool {
    let code = line.split("//").next().unwrap_or_default().trim_start();
    let calls = ["counted(", "ends(", "assert_eq!("].iter().any(|call| code.starts_with(call))
        || code.starts_with("let ends = counted(");
    let ends = |rest: &str| !rest.starts_with(|next: char| next.is_ascii_alphanumeric());
    calls && !code.contains("), 0)") && code.split(&format!("Cause::{cause:?}")).skip(1).any(ends)
}

#[test]
fn only_an_assertion_counts_as_one() {
    let cause = Cause::Replaced;
    for line in [
        "    ends(&setup, &mut old, replaced, Cause::Replaced);",
        "let ends = counted(&setup, Cause::Replaced, 1);",
        "assert_eq!(ends[0].cause, Cause::Replaced);",
        "assert_eq!((ends[0].cause, ends[0].queues), (Cause::Replaced, 1));",
        "assert_eq!(target.counters().ends.of(Cause::Replaced), 1, \"once\");",
    ] {
        assert!(asserts(line, cause), "{line}");
    }
    for line in [
        "// ends(&setup, &mut old, replaced, Cause::Replaced);",
        "let x = 1; // counted(&setup, Cause::Replaced, 1)",
        "use farside::target::Cause::Replaced;",
        "assert_eq!(target.counters().ends.of(Cause::Replaced), 0);",
        "assert_ne!(ends[0].cause, Cause::Replaced);",
        "assert!(ends[0].cause != Cause::Replaced);",
        "let causes = [Cause::Replaced, Cause::Operator];",
        "extends(Cause::Replaced);",
        "counted(&setup, Cause::ReplacedByNobody, 1);",
    ] {
        assert!(!asserts(line, cause), "{line}");
    }
}

/// Each cause is asserted by a scenario of `tests/hosts`, or has a reason why not.
#[test]
fn every_cause_of_an_end_is_provoked_or_has_a_reason() {
    let mut files = Vec::new();
    sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/hosts"), &mut files);
    let lines: Vec<&str> = files.iter().flat_map(|(_, text)| text.lines()).collect();
    for cause in Cause::ALL {
        let name = format!("Cause::{cause:?}");
        let provoked = lines.iter().any(|line| asserts(line, cause));
        let reason = UNPROVOKED.iter().find(|(known, _)| *known == cause);
        assert_eq!(provoked, reason.is_none(), "{name}: provoked, or in UNPROVOKED with its reason: {reason:?}");
    }
}

/// Lessons 1 to 29 and holes H1 to H6 each have a row, and a test or a reason.
#[test]
fn every_lesson_and_hole_has_a_row() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let text = fs::read_to_string(root.join("tests/FIELD-REPORTS.md")).unwrap();
    let (_, table) = text.split_once("\n## What a rival's code taught\n").expect("the table");
    let rows: Vec<Vec<&str>> = table
        .lines()
        .filter(|line| line.starts_with("| "))
        .map(|row| row.trim_matches('|').split('|').map(str::trim).collect())
        .collect();
    let wanted = (1..=29).map(|number| number.to_string()).chain((1..=6).map(|number| format!("H{number}")));
    for number in wanted {
        let found: Vec<_> = rows.iter().filter(|row| row[0] == number).collect();
        let [row] = found[..] else { panic!("{number}: {} rows", found.len()) };
        let &[_, lesson, _, test] = row.as_slice() else { panic!("not four cells: {row:?}") };
        assert!(!lesson.is_empty(), "{row:?}");
        assert!(test.starts_with('`') || test.starts_with("not ours: "), "no test and no reason: {row:?}");
    }
}

/// Every key that the configuration's reader knows stands in the README's example, but for those of the test tool.
#[test]
fn every_key_of_the_configuration_is_in_the_readme() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let reader = fs::read_to_string(root.join("src/config/parse.rs")).unwrap();
    let readme = fs::read_to_string(root.join("README.md")).unwrap();
    let example = readme.split("```").find_map(|block| block.strip_prefix("toml\n")).expect("an example");
    let words: Vec<&str> = example.split(|c: char| c != '_' && !c.is_ascii_alphanumeric()).collect();
    let (_, test_tool) = reader.split_once("fn read_faults(").expect("the test tool's section");
    let (test_tool, _) = test_tool.split_once("\nfn ").expect("a function after it");
    let starts =
        [".string(", ".bool(", ".number(", ".size(", ".strings(", ".section(", ".sections(", "(&mut section, "];
    let mut keys: Vec<&str> = Vec::new();
    for start in starts {
        let calls = reader.split(start).skip(1);
        keys.extend(calls.filter_map(|rest| rest.strip_prefix('"')?.split('"').next()));
    }
    keys.retain(|key| *key != "faults" && !test_tool.contains(&format!("(\"{key}\"")));
    assert!(keys.len() > 60, "only {} keys: the search is broken", keys.len());
    keys.retain(|key| !words.contains(key));
    assert!(keys.is_empty(), "not in the README: {keys:?}");
}

/// What skips itself by a line of its own is not seen where nothing may be skipped.
#[test]
fn skips_go_through_the_helper_that_ci_fails_on() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    for folder in ["src", "nvme/src", "tests"] {
        sources(&root.join(folder), &mut files);
    }
    let said = concat!("\"SKI", "PPED");
    let helper = root.join("tests/hosts/skipped.rs").display().to_string();
    // The virtual machines' cases run those of the verbs provider, and count what they skip.
    let counted = root.join("tests/verbs_pair").display().to_string();
    let skips = |(name, text): &&(String, String)| name.ends_with(".rs") && text.contains(said);
    let skipping: Vec<&String> = files.iter().filter(skips).map(|(name, _)| name).collect();
    assert!(skipping.contains(&&helper), "the search is broken: {skipping:?}");
    let others: Vec<_> = skipping.iter().filter(|name| ***name != helper && !name.starts_with(&counted)).collect();
    assert!(others.is_empty(), "skipped without the helper: {others:?}");
}

/// A file that nothing declares is not compiled, and its tests never run.
#[test]
fn every_source_file_is_a_module() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    for folder in ["src", "nvme/src", "tests/hosts", "tests/process", "tests/verbs_pair", "tests/bench/core"] {
        sources(&root.join(folder), &mut files);
    }
    let mut outside = Vec::new();
    for (name, _) in &files {
        let path = Path::new(name);
        let (Some(folder), Some(stem)) = (path.parent(), path.file_stem().and_then(|stem| stem.to_str())) else {
            continue;
        };
        if ["main", "lib"].contains(&stem) || path.extension().is_none_or(|ext| ext != "rs") {
            continue;
        }
        // The module of a folder is declared one folder up.
        let (home, module) = match stem {
            "mod" => (folder.parent().unwrap(), folder.file_name().unwrap().to_str().unwrap()),
            _ => (folder, stem),
        };
        let declares = |text: &str| {
            let line = format!("mod {module};");
            text.lines().map(str::trim).any(|found| found == line || found.ends_with(&format!(" {line}")))
        };
        let beside =
            |file: &str| files.iter().any(|(other, text)| Path::new(other) == home.join(file) && declares(text));
        if !["mod.rs", "main.rs", "lib.rs"].into_iter().any(beside) {
            outside.push(name);
        }
    }
    assert!(files.len() > 200, "only {} files found", files.len());
    assert!(outside.is_empty(), "nothing declares {outside:?}");
}
