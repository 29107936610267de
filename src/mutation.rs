//! Faults put into the code on purpose, one at a time, to see whether the simulation notices. Nothing is left of them outside
//! of test builds.

/// A fault, named for what the code does not do right any more.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Mutation {
    /// Going back for a lost packet, the requester leaves it out.
    SkippedRetransmit,
    /// The responder acknowledges an RDMA WRITE and places its data later.
    #[cfg(test)]
    AckBeforePlacement,
    /// A read's buffer is free as soon as its RDMA WRITE is posted.
    BufferReusedEarly,
    /// Sequence numbers are compared as if they did not wrap.
    PsnWrap,
    /// A SEND that comes twice completes two receives.
    DoubleCompletion,
    /// Flush is answered, not done.
    FlushDropped,
    /// The RDMA READs of a command that had to wait for more of them put their data at the start.
    SecondBatchOffset,
    /// The response does not invalidate the host's key.
    MissedInvalidate,
    /// A lost RTU is not made good: neither by the peer's traffic nor by an answer to the repeated REP.
    LostRtu,
    /// The key of the command before.
    #[cfg(test)]
    StaleRkey,
}

#[cfg(test)]
impl Mutation {
    pub(crate) const ALL: [Self; 10] = [
        Self::SkippedRetransmit,
        Self::AckBeforePlacement,
        Self::BufferReusedEarly,
        Self::PsnWrap,
        Self::DoubleCompletion,
        Self::FlushDropped,
        Self::SecondBatchOffset,
        Self::MissedInvalidate,
        Self::LostRtu,
        Self::StaleRkey,
    ];
}

#[cfg(test)]
std::thread_local! {
    static ACTIVE: std::cell::Cell<Option<Mutation>> = const { std::cell::Cell::new(None) };
    static LAST_RKEY: std::cell::Cell<u32> = const { std::cell::Cell::new(0) };
}

/// Runs `work` with a fault in this thread's code.
#[cfg(test)]
pub(crate) fn with<T>(mutation: Mutation, work: impl FnOnce() -> T) -> T {
    ACTIVE.set(Some(mutation));
    let result = work();
    ACTIVE.set(None);
    result
}

/// Whether the code has this fault now.
#[cfg(test)]
pub(crate) fn is_on(mutation: Mutation) -> bool {
    ACTIVE.get() == Some(mutation)
}

/// Whether the code has this fault now: never.
#[cfg(not(test))]
pub(crate) const fn is_on(_: Mutation) -> bool {
    false
}

/// The key that a work request uses: with [`Mutation::StaleRkey`] the one before it.
#[cfg(test)]
pub(crate) fn rkey(right: u32) -> u32 {
    let stale = LAST_RKEY.replace(right);
    if is_on(Mutation::StaleRkey) && stale != 0 { stale } else { right }
}

/// The key that a work request uses.
#[cfg(not(test))]
pub(crate) const fn rkey(right: u32) -> u32 {
    right
}
