//! The seccomp profile that the program ships: enough to serve and to be used, and what is said without io_uring.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Command, Output};

use farside::doctor::SECCOMP_PROFILE;

use crate::served::{Served, own_address};

/// The calls that the profile may name, with their numbers on this machine.
macro_rules! calls {
    ($($name:ident $number:ident,)+) => {
        &[$((stringify!($name), libc::$number)),+]
    };
}

const CALLS: &[(&str, libc::c_long)] = calls! {
    accept SYS_accept, accept4 SYS_accept4, access SYS_access, arch_prctl SYS_arch_prctl, bind SYS_bind, brk SYS_brk,
    capget SYS_capget, capset SYS_capset, chdir SYS_chdir, chmod SYS_chmod, clock_getres SYS_clock_getres,
    clock_gettime SYS_clock_gettime, clock_nanosleep SYS_clock_nanosleep, clone SYS_clone, clone3 SYS_clone3,
    close SYS_close, close_range SYS_close_range, connect SYS_connect, copy_file_range SYS_copy_file_range,
    dup SYS_dup, dup2 SYS_dup2, dup3 SYS_dup3, epoll_create1 SYS_epoll_create1, epoll_ctl SYS_epoll_ctl,
    epoll_pwait SYS_epoll_pwait, epoll_wait SYS_epoll_wait, eventfd2 SYS_eventfd2, execve SYS_execve, exit SYS_exit,
    exit_group SYS_exit_group, faccessat SYS_faccessat, faccessat2 SYS_faccessat2, fadvise64 SYS_fadvise64,
    fallocate SYS_fallocate, fchdir SYS_fchdir, fchmod SYS_fchmod, fchmodat SYS_fchmodat, fchown SYS_fchown,
    fchownat SYS_fchownat, fcntl SYS_fcntl, fdatasync SYS_fdatasync, flock SYS_flock, fstat SYS_fstat,
    fstatfs SYS_fstatfs, fsync SYS_fsync, ftruncate SYS_ftruncate, futex SYS_futex,
    get_robust_list SYS_get_robust_list, getcwd SYS_getcwd, getdents64 SYS_getdents64, getegid SYS_getegid,
    geteuid SYS_geteuid, getgid SYS_getgid, getgroups SYS_getgroups, getpeername SYS_getpeername, getpgrp SYS_getpgrp,
    getpid SYS_getpid, getppid SYS_getppid, getrandom SYS_getrandom, getresgid SYS_getresgid, getresuid SYS_getresuid,
    getrlimit SYS_getrlimit, getrusage SYS_getrusage, getsid SYS_getsid, getsockname SYS_getsockname,
    getsockopt SYS_getsockopt, gettid SYS_gettid, gettimeofday SYS_gettimeofday, getuid SYS_getuid,
    io_uring_enter SYS_io_uring_enter, io_uring_register SYS_io_uring_register, io_uring_setup SYS_io_uring_setup,
    ioctl SYS_ioctl, kill SYS_kill, listen SYS_listen, lseek SYS_lseek, lstat SYS_lstat, madvise SYS_madvise,
    membarrier SYS_membarrier, memfd_create SYS_memfd_create, mincore SYS_mincore, mkdir SYS_mkdir,
    mkdirat SYS_mkdirat, mlock SYS_mlock, mlock2 SYS_mlock2, mlockall SYS_mlockall, mmap SYS_mmap,
    mprotect SYS_mprotect, mremap SYS_mremap, munlock SYS_munlock, munlockall SYS_munlockall, munmap SYS_munmap,
    nanosleep SYS_nanosleep, newfstatat SYS_newfstatat, open SYS_open, openat SYS_openat, pipe2 SYS_pipe2,
    poll SYS_poll, ppoll SYS_ppoll, prctl SYS_prctl, pread64 SYS_pread64, preadv SYS_preadv, preadv2 SYS_preadv2,
    prlimit64 SYS_prlimit64, pselect6 SYS_pselect6, pwrite64 SYS_pwrite64, pwritev SYS_pwritev, pwritev2 SYS_pwritev2,
    read SYS_read, readlink SYS_readlink, readlinkat SYS_readlinkat, readv SYS_readv, recvfrom SYS_recvfrom,
    recvmmsg SYS_recvmmsg, recvmsg SYS_recvmsg, rename SYS_rename, renameat SYS_renameat, renameat2 SYS_renameat2,
    restart_syscall SYS_restart_syscall, rmdir SYS_rmdir, rseq SYS_rseq, rt_sigaction SYS_rt_sigaction,
    rt_sigpending SYS_rt_sigpending, rt_sigprocmask SYS_rt_sigprocmask, rt_sigreturn SYS_rt_sigreturn,
    rt_sigsuspend SYS_rt_sigsuspend, rt_sigtimedwait SYS_rt_sigtimedwait, sched_getaffinity SYS_sched_getaffinity,
    sched_getparam SYS_sched_getparam, sched_getscheduler SYS_sched_getscheduler,
    sched_setaffinity SYS_sched_setaffinity, sched_yield SYS_sched_yield, select SYS_select, sendmmsg SYS_sendmmsg,
    sendmsg SYS_sendmsg, sendto SYS_sendto, set_robust_list SYS_set_robust_list, set_tid_address SYS_set_tid_address,
    setgid SYS_setgid, setgroups SYS_setgroups, setpgid SYS_setpgid, setresgid SYS_setresgid, setresuid SYS_setresuid,
    setrlimit SYS_setrlimit, setsid SYS_setsid, setsockopt SYS_setsockopt, setuid SYS_setuid, shutdown SYS_shutdown,
    sigaltstack SYS_sigaltstack, signalfd4 SYS_signalfd4, socket SYS_socket, socketpair SYS_socketpair, stat SYS_stat,
    statfs SYS_statfs, statx SYS_statx, sysinfo SYS_sysinfo, tgkill SYS_tgkill, timerfd_create SYS_timerfd_create,
    timerfd_settime SYS_timerfd_settime, umask SYS_umask, uname SYS_uname, unlink SYS_unlink, unlinkat SYS_unlinkat,
    wait4 SYS_wait4, waitid SYS_waitid, write SYS_write, writev SYS_writev,
};

/// Numbers of the calls that the profile allows, without those whose names begin with `without`.
fn allowed(without: &str) -> Vec<u32> {
    let profile: serde_json::Value = serde_json::from_str(SECCOMP_PROFILE).expect("JSON");
    assert_eq!((&profile["defaultAction"], &profile["defaultErrnoRet"]), (&"SCMP_ACT_ERRNO".into(), &1.into()));
    let groups = profile["syscalls"].as_array().expect("a list");
    let names = groups.iter().flat_map(|group| {
        assert_eq!(group["action"], "SCMP_ACT_ALLOW");
        group["names"].as_array().expect("a list").iter().map(|name| name.as_str().expect("a name"))
    });
    let number = |name: &str| {
        let known = CALLS.iter().find(|(call, _)| *call == name);
        known.unwrap_or_else(|| panic!("{name} is not among the calls that this test knows")).1 as u32
    };
    names.filter(|name| without.is_empty() || !name.starts_with(without)).map(number).collect()
}

/// A filter as container engines make it of a profile: what is not allowed fails with EPERM.
fn filter(allowed: &[u32]) -> Vec<libc::sock_filter> {
    let op = |code: u32, jt, jf, k| libc::sock_filter { code: code as u16, jt, jf, k };
    // The number of the call is the first word of what the filter sees.
    let mut program = vec![op(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0)];
    for number in allowed {
        program.push(op(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, *number));
        program.push(op(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW));
    }
    program.push(op(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32));
    program
}

/// Puts a command under a filter, from its execve on.
pub(crate) fn confine(command: &mut Command, without: &str) {
    let mut program = filter(&allowed(without));
    let install = move || {
        let fprog = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
        // SAFETY: prctl with integers, and with a program that lives until the call returns; both may be called after fork.
        let done = unsafe {
            libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
                && libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const fprog) == 0
        };
        if done { Ok(()) } else { Err(io::Error::last_os_error()) }
    };
    // SAFETY: `install` allocates nothing and takes no lock.
    unsafe { command.pre_exec(install) };
}

fn run(arguments: &[&str], without: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_farside"));
    command.args(arguments);
    confine(&mut command, without);
    command.output().expect("the program")
}

#[test]
fn the_profile_is_enough_to_serve_a_file_and_to_use_it() {
    let served =
        Served::start_with("reactors = 1", "file = \"disk.img\"\nsize = \"16M\"", |command| confine(command, ""));
    let (address, source) = (served.address.to_string(), own_address().to_string());
    let load = ["--rw", "randrw", "--bs", "4K", "--iodepth", "8", "--runtime", "1", "--verify", "--size", "8M"];
    let common = ["bench", &address, "--provider", "soft", "--source", &source];
    let done = run(&[&common[..], &load].concat(), "");
    let (out, err) = (String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
    assert!(done.status.success() && out.contains(" 0 errors"), "{out}{err}\n{}", served.log());
}

#[test]
fn without_io_uring_one_line_names_the_profile() {
    let address = format!("{}:4420", own_address());
    let refused = run(&["serve", "--null", "1G", "--provider", "soft", "--listen", &address], "io_uring");
    let err = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success());
    let lines: Vec<&str> = err.lines().filter(|line| line.starts_with("farside: ")).collect();
    assert_eq!(lines.len(), 1, "{err}");
    assert!(lines[0].contains("io_uring") && lines[0].contains("farside doctor --seccomp-profile"), "{err}");
}

#[test]
fn the_profile_is_printed() {
    let printed = Command::new(env!("CARGO_BIN_EXE_farside")).args(["doctor", "--seccomp-profile"]).output();
    assert_eq!(String::from_utf8(printed.expect("the program").stdout).expect("text"), SECCOMP_PROFILE);
}
