//! Unsafe code lives in named islands and nowhere else.

use std::fs;
use std::path::{Path, PathBuf};

/// Files and folders that may hold unsafe code; `src/rdma/mod.rs` only declares the boundary's one unsafe method.
const ISLANDS: [&str; 7] = [
    "src/rdma/mod.rs",
    "src/mem/",
    "src/rdma/verbs/",
    "src/rdma/soft/",
    "src/rdma/local/",
    "src/backend/ring/",
    "src/backend/ioctl.rs",
];

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

#[test]
fn unsafe_code_stays_in_its_islands() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    for folder in ["src", "nvme/src", "examples"] {
        sources(&root.join(folder), &mut files);
    }
    assert!(files.len() > 50, "only {} files found", files.len());
    let mut outside = Vec::new();
    let mut inside = 0;
    for path in files {
        let name = path.strip_prefix(root).unwrap().to_string_lossy().into_owned();
        let text = fs::read_to_string(&path).unwrap();
        let holds = text
            .lines()
            .map(|line| line.split("//").next().unwrap_or(""))
            .any(|code| code.split(|c: char| !c.is_alphanumeric() && c != '_').any(|word| word == "unsafe"));
        match (holds, ISLANDS.iter().any(|island| name.starts_with(island))) {
            (true, false) => outside.push(name),
            (true, true) => inside += 1,
            (false, _) => {}
        }
    }
    assert!(outside.is_empty(), "unsafe code outside the islands: {outside:?}");
    assert!(inside > 5, "the search finds nothing: it is broken");
}
