//! What a test says that cannot run here. Unit tests have this file too.

use std::io::Write;

/// Says that the calling test is skipped, and what is missing, also where the test runner captures output. With `CI=true`
/// nothing may be missing, and the test fails.
#[track_caller]
pub(crate) fn skipped(missing: &str) {
    let test = std::thread::current().name().unwrap_or_default().to_owned();
    assert!(!is_ci(std::env::var("CI").ok().as_deref()), "{test} is skipped, which CI does not allow: {missing}");
    let _ = writeln!(std::io::stderr(), "SKIPPED {test}: {missing}");
}

/// As the virtual machines' cases read it.
fn is_ci(variable: Option<&str>) -> bool {
    variable == Some("true")
}

#[test]
fn skips_are_failures_where_ci_is_true() {
    assert!(is_ci(Some("true")));
    assert!(!is_ci(Some("")) && !is_ci(None));
}
