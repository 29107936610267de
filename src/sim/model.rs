//! What a host knows of its blocks: which contents a read may return now, and which after a power cut.
//!
//! The content of a block is made from a stamp, a number that no other write has; stamp 0 is a block of zeroes. A block that a
//! command under way touches is busy: nothing else goes there, so that every read has one right answer, or a set of right
//! ones after something failed.

use super::disk::BLOCK;

/// One block.
#[derive(Clone, Debug, Default)]
struct Block {
    /// What it may hold.
    now: Vec<u64>,
    /// What it may hold after the power failed.
    crash: Vec<u64>,
    /// Counts how often `crash` was set anew.
    settled: u64,
    /// Reads under way, or [`WRITING`].
    busy: u8,
}

const WRITING: u8 = u8::MAX;

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Model {
    /// The host's first block in the namespace.
    first: u64,
    blocks: Vec<Block>,
    /// Answered writes are on stable storage.
    durable: bool,
    next_stamp: u64,
    unsettled: Vec<usize>,
}

/// What a flush promises when it is answered: contents, as they were when it was submitted.
#[derive(Clone, Debug, Default)]
pub(crate) struct FlushPromise(Vec<Promise>);

#[derive(Clone, Debug)]
struct Promise {
    block: usize,
    now: Vec<u64>,
    crash_len: usize,
    settled: u64,
}

/// Blocks of a command, counted from the host's first one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) start: usize,
    pub(crate) count: usize,
}

impl Span {
    fn range(self) -> std::ops::Range<usize> {
        self.start..self.start + self.count
    }
}

impl Model {
    pub(crate) fn new(first: u64, blocks: usize, durable: bool, host: u64) -> Self {
        let block = Block { now: vec![0], crash: vec![0], settled: 0, busy: 0 };
        Self { first, blocks: vec![block; blocks], durable, next_stamp: host << 40 | 1, unsettled: Vec::new() }
    }

    pub(crate) fn len(&self) -> usize {
        self.blocks.len()
    }

    pub(crate) fn lba(&self, span: Span) -> u64 {
        self.first + span.start as u64
    }

    pub(crate) fn new_stamp(&mut self) -> u64 {
        self.next_stamp += 1;
        self.next_stamp
    }

    pub(crate) fn is_free(&self, span: Span, to_write: bool) -> bool {
        self.blocks[span.range()].iter().all(|block| if to_write { block.busy == 0 } else { block.busy < WRITING - 1 })
    }

    /// The only content that a span may have, if there is one: what a Compare can be told to expect.
    pub(crate) fn known(&self, span: Span) -> Option<Vec<u64>> {
        self.blocks[span.range()].iter().map(|block| (block.now.len() == 1).then(|| block.now[0])).collect()
    }

    pub(crate) fn begin_read(&mut self, span: Span) {
        for block in &mut self.blocks[span.range()] {
            block.busy += 1;
        }
    }

    pub(crate) fn end_read(&mut self, span: Span) {
        for block in &mut self.blocks[span.range()] {
            block.busy -= 1;
        }
    }

    /// A write is on its way: it may reach the medium from now on.
    pub(crate) fn begin_write(&mut self, span: Span, stamp: u64) {
        for at in span.range() {
            let block = &mut self.blocks[at];
            block.busy = WRITING;
            if block.crash.len() == 1 {
                self.unsettled.push(at);
            }
            block.crash.push(stamp);
        }
    }

    /// A write was answered well. `stable`: it was FUA.
    pub(crate) fn end_write(&mut self, span: Span, stamp: u64, stable: bool) {
        let durable = self.durable;
        for block in &mut self.blocks[span.range()] {
            block.busy = 0;
            block.now = vec![stamp];
            if stable || durable {
                block.crash = vec![stamp];
                block.settled += 1;
            }
        }
    }

    /// A write failed, or its host died: each block has it or not.
    pub(crate) fn fail_write(&mut self, span: Span, stamp: u64) {
        for block in &mut self.blocks[span.range()] {
            block.busy = 0;
            if !block.now.contains(&stamp) {
                block.now.push(stamp);
            }
        }
    }

    /// What a flush that is submitted now promises.
    pub(crate) fn begin_flush(&mut self) -> FlushPromise {
        self.unsettled.sort_unstable();
        self.unsettled.dedup();
        self.unsettled.retain(|at| self.blocks[*at].crash.len() > 1);
        let promise = |at: &usize| {
            let block = &self.blocks[*at];
            (block.busy != WRITING).then(|| Promise {
                block: *at,
                now: block.now.clone(),
                crash_len: block.crash.len(),
                settled: block.settled,
            })
        };
        FlushPromise(self.unsettled.iter().filter_map(promise).collect())
    }

    /// A flush was answered well. Blocks whose promise was overtaken keep what they had.
    pub(crate) fn end_flush(&mut self, promise: FlushPromise) {
        for Promise { block, mut now, crash_len, settled } in promise.0 {
            let block = &mut self.blocks[block];
            if block.settled == settled {
                now.extend(block.crash.drain(..).skip(crash_len));
                block.crash = now;
                block.settled += 1;
            }
        }
    }

    /// The power of the disk failed.
    pub(crate) fn power_cut(&mut self) {
        for block in &mut self.blocks {
            block.crash.dedup();
            block.now = block.crash.clone();
            block.settled += 1;
        }
    }

    /// Holds what was read against what may be there. What was seen stays, unless it was seen before a power cut.
    pub(crate) fn check(&mut self, span: Span, bytes: &[u8], stays: bool) -> Result<(), String> {
        for (at, bytes) in span.range().zip(bytes.chunks(BLOCK)) {
            let lba = self.first + at as u64;
            let block = &mut self.blocks[at];
            let Some(stamp) = block.now.iter().copied().find(|stamp| is_content(bytes, *stamp, lba)) else {
                return Err(format!("block {lba} holds {}, it may hold {:x?}", describe(bytes), block.now));
            };
            if stays && block.now.len() > 1 {
                block.now = vec![stamp];
            }
        }
        Ok(())
    }
}

/// Fills a buffer with the content of one stamp.
pub(crate) fn fill(bytes: &mut [u8], stamp: u64, first_lba: u64) {
    for (lba, block) in (first_lba..).zip(bytes.chunks_mut(BLOCK)) {
        fill_block(block, stamp, lba);
    }
}

pub(crate) fn fill_block(block: &mut [u8], stamp: u64, lba: u64) {
    if stamp == 0 {
        block.fill(0);
        return;
    }
    for (word, bytes) in words(stamp, lba).zip(block.chunks_exact_mut(8)) {
        bytes.copy_from_slice(&word.to_le_bytes());
    }
}

fn is_content(block: &[u8], stamp: u64, lba: u64) -> bool {
    if stamp == 0 {
        return block.iter().all(|byte| *byte == 0);
    }
    words(stamp, lba).zip(block.chunks_exact(8)).all(|(word, bytes)| bytes == word.to_le_bytes())
}

/// Stamp, place, then words that differ at every position.
fn words(stamp: u64, lba: u64) -> impl Iterator<Item = u64> {
    let seed = stamp.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ lba << 32;
    [stamp, lba].into_iter().chain((2..).map(move |at| seed.wrapping_add(at * 0x0101_0101_0101_0101)))
}

fn describe(block: &[u8]) -> String {
    let word = |at: usize| block[at..at + 8].try_into().map_or(0, u64::from_le_bytes);
    let (stamp, lba) = (word(0), word(8));
    if block.iter().all(|byte| *byte == 0) {
        "zeroes".into()
    } else if is_content(block, stamp, lba) {
        format!("write {stamp:x} of block {lba}")
    } else {
        format!("a mixture that begins with write {stamp:x} of block {lba}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPAN: Span = Span { start: 1, count: 2 };

    fn content(stamp: u64) -> Vec<u8> {
        let mut bytes = vec![0; 2 * BLOCK];
        fill(&mut bytes, stamp, 11);
        bytes
    }

    fn written(durable: bool) -> Model {
        let mut model = Model::new(10, 4, durable, 0);
        model.begin_write(SPAN, 7);
        assert!(!model.is_free(SPAN, false));
        model.end_write(SPAN, 7, false);
        model
    }

    #[test]
    fn an_answered_write_is_what_is_read() {
        let mut model = written(false);
        assert!(model.check(SPAN, &content(7), true).is_ok());
        assert!(model.check(SPAN, &content(0), true).is_err());
        assert!(model.check(SPAN, &content(6), true).is_err());
        let mut mixed = content(7);
        mixed[600] ^= 1;
        assert!(model.check(SPAN, &mixed, true).is_err());
    }

    #[test]
    fn a_power_cut_takes_what_was_not_flushed_and_nothing_else() {
        let mut model = written(false);
        let promise = model.begin_flush();
        model.begin_write(Span { start: 1, count: 1 }, 8);
        model.end_write(Span { start: 1, count: 1 }, 8, false);
        model.end_flush(promise);
        model.power_cut();
        let one = &content(8)[..BLOCK];
        assert!(model.check(SPAN, &[one, &content(7)[BLOCK..]].concat(), true).is_ok());
        assert!(model.check(Span { start: 1, count: 1 }, &content(7)[..BLOCK], true).is_err(), "8 was seen there");
        let mut model = written(false);
        model.power_cut();
        assert!(model.check(SPAN, &content(0), true).is_ok(), "never flushed");
        let mut model = written(true);
        model.power_cut();
        assert!(model.check(SPAN, &content(0), true).is_err(), "no volatile cache");
    }

    #[test]
    fn a_failed_write_leaves_a_choice_that_the_first_read_makes() {
        let mut model = written(false);
        model.begin_write(SPAN, 9);
        model.fail_write(SPAN, 9);
        assert!(model.known(SPAN).is_none());
        let mixed = [&content(9)[..BLOCK], &content(7)[BLOCK..]].concat();
        assert!(model.check(SPAN, &mixed, true).is_ok());
        assert!(model.check(SPAN, &content(9), true).is_err());
        assert_eq!(model.known(SPAN), Some(vec![9, 7]));
    }
}
