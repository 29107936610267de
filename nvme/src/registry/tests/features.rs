//! Get and Set Features through the registry: data both ways, and what belongs to the association.

use super::*;

fn get(fid: u32, cdw11: u32, data: u32) -> Command {
    command(0x0a, 0, data, [fid, cdw11, 0, 0, 0, 0])
}

#[test]
fn host_identifier_is_the_one_of_connect() {
    let mut bench = Bench::new();
    let ctrl = bench.host();
    assert_eq!(bench.data(ctrl, &get(0x81, 1, 16)), Ok(vec![9; 16]));
    assert_eq!(bench.data(ctrl, &get(0x81, 1, 15)), Err(Status::DATA_SGL_LENGTH_INVALID.dnr()));
    assert_eq!(bench.data(ctrl, &get(0x81, 0, 16)), Err(Status::INVALID_FIELD.dnr()));
    let set = command(0x09, 0, 16, [0x81, 1, 0, 0, 0, 0]);
    assert_eq!(bench.completed(ctrl, &set), Err(Status::COMMAND_SEQUENCE_ERROR.dnr()));
}

#[test]
fn a_feature_with_data_fetches_them_first() {
    let mut bench = Bench::new();
    let ctrl = bench.host();
    let set = |len| command(0x09, 0, len, [0x16, 0, 0, 0, 0, 0]);
    assert_eq!(bench.admin(ctrl, &set(512)), Action::FetchData { len: 512 });
    let mut data = vec![0; 512];
    data[0] = 1;
    let done = bench.registry.admin(ctrl, &set(512), Some(&data), SECOND);
    assert_eq!(done, Action::Complete(Completion::success(0x1234)));
    assert_eq!(bench.data(ctrl, &get(0x16, 0, 512)), Ok(data));
    assert_eq!(bench.completed(ctrl, &set(511)), Err(Status::DATA_SGL_LENGTH_INVALID.dnr()));
}

#[test]
fn number_of_queues_is_fixed_while_queues_exist() {
    let mut bench = Bench::new();
    let ctrl = bench.host();
    let set = command(0x09, 0, 0, [7, 0x0003_0003, 0, 0, 0, 0]);
    assert_eq!(bench.completed(ctrl, &set), Ok(0x0003_0003));
    bench.io_queue(ctrl, 1).unwrap();
    assert_eq!(bench.completed(ctrl, &set), Err(Status::COMMAND_SEQUENCE_ERROR.dnr()));
    bench.close(ctrl, 1);
    assert_eq!(bench.completed(ctrl, &set), Ok(0x0003_0003));
}

#[test]
fn keep_alive_timeout_of_connect_is_rounded_up_and_can_be_set() {
    let mut bench = Bench::new();
    let ctrl = bench.dial(Dial { kato: 1500, ..Dial::admin() }).unwrap().ctrl;
    bench.enable(ctrl);
    assert_eq!(bench.completed(ctrl, &get(0x0f, 0, 0)), Ok(2000));
    let set = command(0x09, 0, 0, [0x0f, 7000, 0, 0, 0, 0]);
    assert_eq!(bench.completed(ctrl, &set), Ok(0));
    assert_eq!(bench.registry.controller(ctrl).unwrap().kato, Some(7 * SECOND));
}

#[test]
fn discovery_controllers_refuse_io_features_quietly() {
    let mut bench = Bench::new();
    let ctrl = bench.discovery_host();
    assert_eq!(bench.completed(ctrl, &get(7, 0, 0)), Err(Status::INVALID_FIELD.dnr()));
    assert_eq!(bench.completed(ctrl, &get(0x0b, 0, 0)), Ok(1 << 31));
    assert_eq!(bench.completed(ctrl, &get(0x0f, 0, 0)), Ok(5000));
    let set = command(0x09, 0, 0, [0x0b, 0x100, 0, 0, 0, 0]);
    assert_eq!(bench.completed(ctrl, &set), Err(Status::INVALID_FIELD.dnr()));
}
