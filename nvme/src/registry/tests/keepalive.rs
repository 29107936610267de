//! Keep alive: both sides of each limit.

use super::*;

const MILLI: Duration = Duration::from_millis(1);

fn silent(_: ControllerId) -> Option<Duration> {
    None
}

#[test]
fn a_silent_host_expires_after_twice_its_timeout_and_not_before() {
    let mut bench = Bench::new();
    let ctrl = bench.host();
    bench.io_queue(ctrl, 1).unwrap();
    let deadline = bench.now + 10 * SECOND;
    assert_eq!(bench.registry.next_deadline(), Some(deadline));
    bench.registry.handle_timeout(deadline - MILLI, &silent);
    assert_eq!(bench.events(), []);
    assert!(bench.registry.io_allowed(ctrl));
    bench.registry.handle_timeout(deadline, &silent);
    assert_eq!(bench.events(), [Event::Kill { ctrl, reason: KillReason::KeepAliveExpired }]);
    assert!(!bench.registry.io_allowed(ctrl));
    assert_eq!(bench.registry.next_deadline(), None, "told once");
    bench.close(ctrl, 1);
    bench.close(ctrl, 0);
    assert_eq!(bench.registry.controllers().count(), 0);
}

#[test]
fn traffic_on_any_queue_keeps_it_alive() {
    let mut bench = Bench::new();
    let ctrl = bench.host();
    let deadline = bench.registry.next_deadline().unwrap();
    let seen = deadline - SECOND;
    bench.registry.handle_timeout(deadline, &|asked| {
        assert_eq!(asked, ctrl);
        Some(seen)
    });
    assert_eq!(bench.events(), []);
    assert_eq!(bench.registry.next_deadline(), Some(seen + 10 * SECOND));
}

#[test]
fn keep_alive_and_any_admin_command_count() {
    let mut bench = Bench::new();
    let ctrl = bench.host();
    for command in [command(0x18, 0, 0, [0; 6]), command(0x7f, 4, 0, [0, 8, 0, 0, 0, 0])] {
        bench.now += 9 * SECOND;
        bench.completed(ctrl, &command).unwrap();
        assert_eq!(bench.registry.next_deadline(), Some(bench.now + 10 * SECOND));
    }
    bench.now += 9 * SECOND;
    bench.io_queue(ctrl, 1).unwrap();
    assert_eq!(bench.registry.next_deadline(), Some(bench.now + 10 * SECOND));
}

#[test]
fn without_a_timeout_nothing_expires_and_keep_alive_has_no_meaning() {
    let mut bench = Bench::new();
    let ctrl = bench.dial(Dial { kato: 0, ..Dial::admin() }).unwrap().ctrl;
    assert_eq!(bench.registry.next_deadline(), None);
    bench.registry.handle_timeout(Duration::MAX, &silent);
    assert_eq!(bench.events(), []);
    let refused = bench.completed(ctrl, &command(0x18, 0, 0, [0; 6]));
    assert_eq!(refused, Err(Status::KEEP_ALIVE_TIMEOUT_INVALID.dnr()));
}

#[test]
fn set_features_moves_the_deadline() {
    let mut bench = Bench::new();
    let ctrl = bench.host();
    let set = |millis| command(0x09, 0, 0, [0x0f, millis, 0, 0, 0, 0]);
    bench.completed(ctrl, &set(60_000)).unwrap();
    assert_eq!(bench.registry.next_deadline(), Some(bench.now + 120 * SECOND));
    bench.completed(ctrl, &set(0)).unwrap();
    assert_eq!(bench.registry.next_deadline(), None);
}

#[test]
fn discovery_without_a_timeout_ends_when_idle_and_with_one_persists() {
    let mut bench = Bench::new();
    let transient = bench.dial(Dial::discovery(0)).unwrap().ctrl;
    assert_eq!(bench.registry.next_deadline(), Some(bench.now + 120 * SECOND));
    let persistent = bench.dial(Dial::discovery(100_000)).unwrap().ctrl;
    bench.registry.handle_timeout(bench.now + 199 * SECOND, &silent);
    let kill = |ctrl| Event::Kill { ctrl, reason: KillReason::KeepAliveExpired };
    assert_eq!(bench.events(), [kill(transient)]);
    bench.registry.handle_timeout(bench.now + 200 * SECOND, &silent);
    assert_eq!(bench.events(), [kill(persistent)]);
}

#[test]
fn idle_discovery_can_be_left_alone() {
    let mut bench = Bench::with(RegistryConfig { discovery_idle: None, ..RegistryConfig::default() });
    bench.dial(Dial::discovery(0)).unwrap();
    assert_eq!(bench.registry.next_deadline(), None);
}

#[test]
fn the_earliest_deadline_is_the_next_one() {
    let mut bench = Bench::new();
    bench.dial(Dial { kato: 9000, ..Dial::admin() }).unwrap();
    bench.dial(Dial { kato: 3000, ..Dial::admin() }).unwrap();
    bench.dial(Dial { kato: u32::MAX, ..Dial::admin() }).unwrap();
    assert_eq!(bench.registry.next_deadline(), Some(bench.now + 6 * SECOND));
}
