//! What the Linux host's messages mean. (drivers/nvme/host: core.c, rdma.c, fabrics.c)

/// What a message means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Meaning {
    /// What happened.
    pub meaning: &'static str,
    /// What to do about it.
    pub remedy: &'static str,
}

/// Parts that a message has, all of them, and what it means then. The first that fits is taken. A part that ends with a digit
/// ends a number of the message.
pub(super) const KNOWN: &[(&[&str], &str, &str)] = &[
    (
        &["Connect rejected: status 8"],
        "nobody listens on that address and port",
        "start the target, or look at its listeners and the port (4420)",
    ),
    (
        &["Connect rejected: status 10"],
        "the target still knows an earlier connection of this queue pair",
        "the host tries again by itself; a host that was reset needs a moment",
    ),
    (
        &["Connect rejected: status 28"],
        "the target refused the queue, and says why in its own log",
        "read the target's line `connection rejected`",
    ),
    (
        &["rdma_resolve_addr", "failed"],
        "no route or no neighbour on the RDMA interface",
        "ping the target from the host; look at VLAN, address and MTU",
    ),
    (&["rdma connection establishment failed (-104)"], "the target refused the connection", "read the target's log"),
    (
        &["rdma connection establishment failed (-110)"],
        "the target did not answer in time",
        "look at the network: UDP port 4791 must pass, in both directions",
    ),
    (
        &["rdma connection establishment failed (-111)"],
        "nobody listens on that address and port",
        "start the target, or look at its listeners and the port (4420)",
    ),
    (
        &["rdma", "resolution", "failed"],
        "no RDMA device has a route to the target",
        "`farside doctor` on both ends; rdma_rxe needs a link on that interface",
    ),
    (
        &["Connect Invalid Data Parameter, subsysnqn"],
        "the target serves no subsystem of this name",
        "`nvme discover` shows the names",
    ),
    (
        &["Connect Invalid Data Parameter"],
        "a name or an identifier in the Connect command was refused",
        "compare --nqn and --hostnqn with what the target serves and allows",
    ),
    (
        &["Connect for subsystem", "not allowed"],
        "this host is not on the subsystem's list",
        "farside ctl allow-host NQN HOSTNQN",
    ),
    (
        &["Connect Invalid SQE Parameter"],
        "the target refused the size of a queue",
        "lower --queue-size or --nr-io-queues",
    ),
    (
        &["wo/DNR bit: 7"],
        "the command was aborted (status 07h): the target ended it because it was asked to",
        "see who aborted it: a timeout of the host before this line, or the target that disconnects this host",
    ),
    (
        &["Connect command failed", "bit: 386"],
        "the Connect command was refused: a parameter (status 182h)",
        "compare --nqn and --hostnqn with what the target serves and allows",
    ),
    (
        &["Connect command failed", "bit: 16770"],
        "the Connect command was refused: a parameter (status 182h, do not retry)",
        "compare --nqn and --hostnqn with what the target serves and allows",
    ),
    (
        &["Connect command failed", "bit: 16772"],
        "this host is not on the subsystem's list (status 184h)",
        "farside ctl allow-host NQN HOSTNQN",
    ),
    (
        &["Connect command failed", "bit: 16386"],
        "a field of the Connect command was refused (status 02h)",
        "the versions of host and target do not fit: report it",
    ),
    (
        &["Connect command failed", "bit: 881"],
        "the target never answered the Connect command (host aborted it, 371h)",
        "see whether the target stands still: `farside ctl status`",
    ),
    (
        &["sct 0x3 / sc 0x71"],
        "the host gave the command up with the connection (371h)",
        "not the target's answer: look for why the connection was lost",
    ),
    (
        &["sct 0x3 / sc 0x70"],
        "the command ended with its path (370h); multipath sends it again",
        "nothing, if the path comes back",
    ),
    (
        &["starting error recovery"],
        "the host lost the connection and will come back",
        "look before this line for the cause, and in the target's log",
    ),
    (
        &["failed nvme_keep_alive_end_io"],
        "a Keep Alive was not answered in time",
        "see whether the target or the network stands still; a longer -k gives it time",
    ),
    (
        &["keep-alive", "expired"],
        "the target heard nothing of the host for twice its keep alive time",
        "look at the host and the network between",
    ),
    (
        &["I/O", "timeout", "QID"],
        "a command was not answered within the host's timeout (30 s)",
        "look at the disk behind the namespace: it stands still",
    ),
    (&["Reconnecting in"], "the host tries again", "nothing; it gives up after ctrl-loss-tmo"),
    (&["Removing controller"], "the host gave up after ctrl-loss-tmo", "connect again; -l -1 never gives up"),
    (
        &["same host id", "different hostnqn"],
        "two host NQNs on this host share one host ID",
        "give each --hostnqn its own --hostid",
    ),
    (
        &["already connected"],
        "this host is connected to that subsystem by that address",
        "nvme list-subsys; nvme disconnect -n NQN",
    ),
    (
        &["Duplicate cntlid"],
        "two targets gave the same controller ID of one subsystem",
        "give each target its own range: cntlid_min and cntlid_max",
    ),
    (&["Failed to get ANA log"], "the target says that it has ANA and does not answer its log", "report it"),
    (&["globally duplicate IDs"], "two namespaces say that they are the same disk", "give each its own uuid"),
    (
        &["IDs don't match for shared namespace"],
        "one namespace has other identifiers on another path",
        "give it the same uuid on every target",
    ),
    (
        &["Mandatory keyed sgls are not supported"],
        "the target cannot move data as NVMe over RDMA needs",
        "not farside, or a wrong Identify: report it",
    ),
    (
        &["keep-alive support is mandatory"],
        "the target says that it has no keep alive",
        "not farside, or a wrong Identify: report it",
    ),
    (
        &["queue_size", "> ctrl sqsize"],
        "a queue is larger than the target takes; it is made smaller",
        "nothing, or a smaller --queue-size",
    ),
    (
        &["sqsize", "> ctrl maxcmd"],
        "a queue is larger than the target takes; it is made smaller",
        "nothing, or a smaller --queue-size",
    ),
    (&["MEMREG", "failed"], "the host's device could not register memory", "look at the host's driver and firmware"),
    (&["LOCAL_INV", "failed"], "flushed with the connection", "look for why the connection was lost"),
    (&["RECV", "failed with status", "flushed"], "flushed with the connection", "look for why the connection was lost"),
    (
        &["transport retry counter exceeded"],
        "packets got no acknowledgement: the other end or the way to it is gone",
        "ping; look for loss, for PFC, for a wrong MTU on the way",
    ),
    (
        &["RNR retry counter exceeded"],
        "the other end had no receive ready for too long",
        "report it: farside posts a receive for every command that may come",
    ),
    (&["remote access error"], "the other end refused a memory key", "report it with both logs"),
    (&["/dev/nvme-fabrics", "No such file"], "the module nvme-fabrics is not loaded", "modprobe nvme-rdma"),
    (&["no handler found for transport rdma"], "the module nvme-rdma is not loaded", "modprobe nvme-rdma"),
    (
        &["Operation already in progress"],
        "this host is connected to that subsystem already",
        "nvme list-subsys; nvme disconnect -n NQN",
    ),
];

/// What a line of the host's kernel log, or of nvme-cli, means; `None` when it is not known here.
pub fn decode(line: &str) -> Option<Meaning> {
    KNOWN
        .iter()
        .find(|(parts, ..)| parts.iter().all(|part| has(line, part)))
        .map(|(_, meaning, remedy)| Meaning { meaning, remedy })
}

fn has(line: &str, part: &str) -> bool {
    let ends_number = part.ends_with(|last: char| last.is_ascii_digit());
    line.split(part).skip(1).any(|rest| !ends_number || !rest.starts_with(|next: char| next.is_ascii_alphanumeric()))
}
