//! Identify: what a controller and its namespaces are.
//! (NVMe Base 2.x, Identify command; NVM Command Set 1.x, Identify.)

use zerocopy::IntoBytes;

use super::Surroundings;
use super::config::{NamespaceConfig, NamespaceLimits, RegistryConfig, ZonedNamespace};
use super::controller::Controller;
use super::subsystem::{Namespace, Subsystem};
use crate::admin::{Identify, Refused, location};
use crate::aer;
use crate::ana::MAX_GROUPS;
use crate::command::NSID_ALL;
use crate::features;
use crate::io::IoLimits;
use crate::logs;
use crate::nqn::Nqn;
use crate::properties;
use crate::sgl::{MAX_KEYED, SGL_LEN};
use crate::status::Status;
use crate::wire::ascii;
use crate::wire::identify_ctrl::{IdentifyController, IdentifyControllerNvm, IdentifyIoCommandSets};
use crate::wire::identify_ns::{
    Descriptor, IDENTIFY_LEN, IdentifyNamespace, IdentifyNamespaceIndependent, descriptor_list,
};
use crate::wire::zns::{IdentifyControllerZoned, IdentifyNamespaceZoned};
use crate::{io, zns};

/// Bytes of every answer to Identify.
pub(super) const LEN: u32 = 4096;

/// Abort command limit (ACL), zero's based.
pub(super) const ACL: u8 = 3;

/// Controller or namespace structure (CNS).
mod cns {
    pub(super) const NAMESPACE: u8 = 0x00;
    pub(super) const CONTROLLER: u8 = 0x01;
    pub(super) const ACTIVE_NAMESPACES: u8 = 0x02;
    pub(super) const DESCRIPTORS: u8 = 0x03;
    pub(super) const NAMESPACE_CSI: u8 = 0x05;
    pub(super) const CONTROLLER_CSI: u8 = 0x06;
    pub(super) const ACTIVE_NAMESPACES_CSI: u8 = 0x07;
    pub(super) const NAMESPACE_INDEPENDENT: u8 = 0x08;
    pub(super) const IO_COMMAND_SETS: u8 = 0x1c;
}

/// The data structure that the command asks for.
pub(super) fn identify(controller: &Controller, cx: &Surroundings<'_>, command: Identify) -> Result<Vec<u8>, Refused> {
    let mut data = match cx.subsystems.get(&controller.association.subsystem) {
        Some(subsystem) => of_subsystem(controller, subsystem, cx, command)?,
        None if controller.is_discovery() && command.cns == cns::CONTROLLER => {
            discovery_controller(controller, cx.config)
        }
        None => return Err(Refused::invalid_field(location::CDW10)),
    };
    for over in &cx.config.identify_overrides {
        let field = data.iter_mut().skip(over.offset);
        if over.cns == command.cns {
            field.zip(&over.bytes).for_each(|(to, from)| *to = *from);
        }
    }
    Ok(data)
}

fn of_subsystem(
    controller: &Controller,
    subsystem: &Subsystem,
    cx: &Surroundings<'_>,
    command: Identify,
) -> Result<Vec<u8>, Refused> {
    let max = cx.config.max_namespaces;
    let host = &controller.association.hostnqn;
    // A host that chose the NVM command set alone cannot use zones, and is not shown any.
    let sees = |ns: &Namespace| ns.csi() == io::CSI || controller.properties.all_command_sets();
    let of_namespace = |structure: &dyn Fn(&Namespace) -> Vec<u8>| {
        of_namespace(subsystem, host, command, max, &|ns| if sees(ns) { structure(ns) } else { vec![0; IDENTIFY_LEN] })
    };
    match command.cns {
        cns::NAMESPACE => of_namespace(&|ns| namespace(ns, &cx.config.io_limits)),
        cns::CONTROLLER => Ok(io_controller(controller, subsystem, cx.config)),
        cns::ACTIVE_NAMESPACES => active_namespaces(subsystem, host, command, sees),
        cns::DESCRIPTORS => {
            let seen = subsystem.seen(command.nsid, host).filter(|ns| sees(ns));
            seen.map(descriptors).ok_or(INVALID_NAMESPACE)
        }
        cns::NAMESPACE_CSI => {
            check_set(command)?;
            let there = subsystem.seen(command.nsid, host).filter(|ns| sees(ns));
            if command.csi == zns::CSI && there.is_some_and(|ns| ns.csi() != zns::CSI) {
                return Err(Refused::invalid_field(location::CDW11 + 3));
            }
            // What all namespaces have of the NVM command set: no metadata, no protection information.
            of_namespace(&|ns| match &ns.config.zones {
                Some(zones) if command.csi == zns::CSI => zoned_namespace(zones),
                _ => vec![0; IDENTIFY_LEN],
            })
        }
        cns::CONTROLLER_CSI => {
            check_set(command)?;
            // Of zones there is the largest append (ZASL), for which MDTS holds.
            let zoned = || IdentifyControllerZoned::zeroed().as_bytes().to_vec();
            Ok(if command.csi == zns::CSI { zoned() } else { nvm_controller(&cx.config.io_limits) })
        }
        cns::ACTIVE_NAMESPACES_CSI => {
            check_set(command)?;
            active_namespaces(subsystem, host, command, |ns| ns.csi() == command.csi && sees(ns))
        }
        cns::NAMESPACE_INDEPENDENT => of_namespace(&independent),
        cns::IO_COMMAND_SETS => {
            let cntlid = controller.association.cntlid;
            if command.cntid != 0xffff && command.cntid != cntlid {
                return Err(Refused::invalid_field(location::CDW10 + 2));
            }
            Ok(IdentifyIoCommandSets::nvm_and_zoned().as_bytes().to_vec())
        }
        _ => Err(Refused::invalid_field(location::CDW10)),
    }
}

/// A structure of one namespace: zeroes when the identifier is valid but nothing is there, refused when it is not
/// valid. The broadcast value would be for the namespace management that we do not have.
fn of_namespace(
    subsystem: &Subsystem,
    host: &Nqn,
    command: Identify,
    max: u32,
    structure: &dyn Fn(&Namespace) -> Vec<u8>,
) -> Result<Vec<u8>, Refused> {
    if command.nsid == 0 || command.nsid > max {
        return Err(INVALID_NAMESPACE);
    }
    let namespace = subsystem.seen(command.nsid, host);
    Ok(namespace.map_or_else(|| vec![0; IDENTIFY_LEN], structure))
}

/// The command set identifier must name a command set that there is.
fn check_set(command: Identify) -> Result<(), Refused> {
    if !matches!(command.csi, io::CSI | zns::CSI) {
        return Err(Refused::invalid_field(location::CDW11 + 3));
    }
    Ok(())
}

/// Up to 1024 identifiers above the one that the command names, ascending, of namespaces that the host sees and `which` takes.
/// FFFFFFFEh and FFFFFFFFh are refused.
fn active_namespaces(
    subsystem: &Subsystem,
    host: &Nqn,
    command: Identify,
    which: impl Fn(&Namespace) -> bool,
) -> Result<Vec<u8>, Refused> {
    if command.nsid >= NSID_ALL - 1 {
        return Err(INVALID_NAMESPACE);
    }
    let nsids = subsystem.nsids();
    let listed = |nsid: &&u32| subsystem.seen(**nsid, host).is_some_and(&which);
    let seen = nsids.range(command.nsid + 1..).filter(listed);
    let mut list: Vec<u8> = seen.take(IDENTIFY_LEN / 4).flat_map(|nsid| nsid.to_le_bytes()).collect();
    list.resize(IDENTIFY_LEN, 0);
    Ok(list)
}

fn descriptors(namespace: &Namespace) -> Vec<u8> {
    let config = &namespace.config;
    let eui64 = (config.eui64 != [0; 8]).then_some(Descriptor::Eui64(&config.eui64));
    let nguid = (config.nguid != [0; 16]).then_some(Descriptor::Nguid(&config.nguid));
    let always = [Descriptor::Uuid(&config.uuid), Descriptor::CommandSet(namespace.csi())];
    descriptor_list(eui64.into_iter().chain(nguid).chain(always))
}

fn namespace(namespace: &Namespace, io: &IoLimits) -> Vec<u8> {
    let config = &namespace.config;
    let mut id = IdentifyNamespace::zeroed();
    id.nsze.set(config.blocks);
    let capacity = config.zones.map_or(config.blocks, |zones| zones.capacity);
    id.ncap.set(capacity);
    id.nuse.set(capacity);
    id.nmic = NMIC_SHARED;
    if config.deallocated_reads_zero {
        id.dlfeat = DLFEAT_READS_ZERO;
        if config.write_zeroes && config.deallocate {
            id.dlfeat |= DLFEAT_WRITE_ZEROES_DEALLOCATES;
        }
    }
    // Counts of zero mean "not known", which is one block on the wire.
    let limits = &config.limits;
    if *limits != NamespaceLimits::default() {
        id.nsfeat |= NSFEAT_OPTPERF;
        id.npwg.set(limits.npwg.saturating_sub(1));
        id.npwa.set(limits.npwa.saturating_sub(1));
        id.npdg.set(limits.npdg.saturating_sub(1));
        id.npda.set(limits.npda.saturating_sub(1));
        id.nows.set(limits.nows.saturating_sub(1));
        id.noiob.set(limits.noiob);
    }
    if config.copy {
        let view = namespace.view();
        id.mssrl.set(io.copy_range_blocks(&view));
        id.mcl.set(io.copy_blocks(&view));
        id.msrc = u8::try_from(io.copy_ranges.saturating_sub(1)).unwrap_or(u8::MAX);
    }
    id.rescap = rescap(config);
    id.anagrpid.set(config.ana_group);
    id.nsattr = u8::from(namespace.is_read_only());
    id.nguid = config.nguid;
    id.eui64 = config.eui64;
    let [format, ..] = &mut id.lbaf;
    format.lbads = namespace.block_shift;
    id.as_bytes().to_vec()
}

/// Reads may go across zones; there is no limit to how long zones may be open, and nothing that a host has to do for them (ZOC).
fn zoned_namespace(zones: &ZonedNamespace) -> Vec<u8> {
    let zeros_based = |limit: u32| limit.wrapping_sub(1);
    let mut id = IdentifyNamespaceZoned::zeroed();
    id.ozcs.set(OZCS_READ_ACROSS_ZONES);
    // No limit is 0 here and all ones there.
    id.mar.set(zeros_based(zones.geometry.max_active));
    id.mor.set(zeros_based(zones.geometry.max_open));
    let [format, ..] = &mut id.lbafe;
    format.zsze.set(zones.geometry.zone_blocks);
    id.as_bytes().to_vec()
}

/// Reservation capabilities: all six types, Ignore Existing Key as of NVMe 1.3, and persistence where there is somewhere to
/// keep it.
fn rescap(config: &NamespaceConfig) -> u8 {
    let persistent = u8::from(config.persistent);
    if config.reservations { 0xfe | persistent } else { 0 }
}

fn independent(namespace: &Namespace) -> Vec<u8> {
    let config = &namespace.config;
    let mut id = IdentifyNamespaceIndependent::zeroed();
    if config.rotational {
        id.nsfeat |= NSFEAT_ROTATIONAL;
    }
    if !config.volatile_write_cache {
        id.nsfeat |= NSFEAT_NO_VOLATILE_WRITE_CACHE;
    }
    id.nmic = NMIC_SHARED;
    id.rescap = rescap(config);
    id.anagrpid.set(config.ana_group);
    id.nsattr = u8::from(namespace.is_read_only());
    id.nstat = NSTAT_READY;
    id.as_bytes().to_vec()
}

fn nvm_controller(limits: &IoLimits) -> Vec<u8> {
    let shift = |bytes: u32| if bytes == 0 { 0 } else { pages_shift(bytes) };
    let mut id = IdentifyControllerNvm::zeroed();
    id.vsl = shift(limits.verify_bytes);
    id.wzsl = shift(limits.write_zeroes_bytes);
    id.dmrl = limits.dsm_ranges;
    id.dmrsl.set(limits.dsm_range_blocks);
    id.dmsl.set(limits.dsm_blocks);
    id.as_bytes().to_vec()
}

/// What both kinds of controller say. The host checks several of these before it uses a controller at all: KAS, IOCCSZ,
/// IORCSZ, ICDOFF, SGLS bit 2, MAXCMD.
fn controller_base(controller: &Controller, config: &RegistryConfig) -> IdentifyController {
    let mut id = IdentifyController::zeroed();
    id.fr = ascii(&config.firmware);
    id.rab = 6;
    id.mdts = mdts(config);
    id.cntlid.set(controller.association.cntlid);
    id.ver.set(properties::VERSION);
    id.oaes.set(features::supported_notices(controller.is_discovery()));
    id.ctratt.set(CTRATT_HOSTID_128 | CTRATT_TBKAS);
    id.acl = ACL;
    id.aerl = aer::AERL;
    id.elpe = u8::try_from(logs::ERROR_SLOTS - 1).unwrap_or(u8::MAX);
    id.lpa = LPA_EXTENDED_DATA;
    let granularity = config.keep_alive_granularity.as_millis() / 100;
    let delay = config.retry_delay.as_millis() / 100;
    let [first, ..] = &mut id.crdt;
    first.set(u16::try_from(delay).unwrap_or(u16::MAX));
    id.kas.set(u16::try_from(granularity).unwrap_or(u16::MAX).max(1));
    id.sqes = 0x66;
    id.cqes = 0x44;
    id.maxcmd.set(config.max_io_queue_entries);
    let icd = config.in_capsule_data_size;
    id.sgls.set(SGLS_SUPPORTED | SGLS_KEYED | SGLS_LONGER_THAN_DATA);
    if icd > 0 {
        id.sgls.set(id.sgls.get() | SGLS_OFFSET);
    }
    id.subnqn = controller.association.subnqn.to_wire();
    id.ioccsz.set((64 + u32::from(icd)) / 16);
    id.iorcsz.set(1);
    id.msdbd = msdbd(icd);
    id.ofcs.set(OFCS_DISCONNECT);
    id
}

fn io_controller(controller: &Controller, subsystem: &Subsystem, config: &RegistryConfig) -> Vec<u8> {
    let mut id = controller_base(controller, config);
    id.sn = subsystem.serial;
    id.mn = subsystem.model;
    id.cmic = CMIC_MULTIPLE_PORTS | CMIC_MULTIPLE_CONTROLLERS | CMIC_ANA;
    id.anatt = u8::try_from(config.ana_transition.as_secs()).unwrap_or(u8::MAX);
    id.anacap = ANACAP_ALL_STATES;
    id.anagrpmax.set(MAX_GROUPS);
    id.nanagrpid.set(MAX_GROUPS);
    id.cntrltype = 1;
    id.frmw = FRMW_ONE_READ_ONLY_SLOT;
    id.lpa |= LPA_COMMAND_EFFECTS | LPA_MISCELLANEOUS;
    id.nn.set(config.max_namespaces);
    id.mnan.set(config.max_namespaces);
    let commands = subsystem.commands();
    let oncs = [
        (commands.compare, ONCS_COMPARE),
        (commands.deallocate, ONCS_DATASET_MANAGEMENT),
        (commands.write_zeroes, ONCS_WRITE_ZEROES),
        (commands.verify, ONCS_VERIFY),
        (commands.copy, ONCS_COPY),
        (commands.reservations, ONCS_RESERVATIONS),
        (true, ONCS_SAVE_AND_SELECT),
    ];
    let oncs = oncs.into_iter().filter(|(supported, _)| *supported);
    id.oncs.set(oncs.fold(0, |bits, (_, bit)| bits | bit));
    if commands.compare {
        id.fuses.set(FUSES_COMPARE_AND_WRITE);
        // A pair of any size is atomic. This is told in logical blocks of the largest format.
        let blocks = u16::try_from(config.io_limits.mdts_bytes / 4096).unwrap_or(u16::MAX);
        id.acwu.set(blocks.saturating_sub(1));
    }
    if commands.copy {
        id.ocfs.set(OCFS_FORMAT_0);
    }
    if config.write_protection {
        id.nwpc = NWPC_WRITE_PROTECT | NWPC_UNTIL_POWER_CYCLE;
    }
    // A namespace with a cache may come at any time, so hosts are always told to flush; CNS 08h says which namespaces
    // have none.
    id.vwc = VWC_PRESENT | VWC_NO_BROADCAST;
    id.as_bytes().to_vec()
}

/// Every string field is filled, as hosts print them.
fn discovery_controller(controller: &Controller, config: &RegistryConfig) -> Vec<u8> {
    let mut id = controller_base(controller, config);
    id.sn = ascii("discovery");
    id.mn = ascii(&config.model);
    id.cntrltype = 2;
    id.dctype = DCTYPE_DIRECT;
    id.as_bytes().to_vec()
}

/// MDTS as a power of two in units of the minimum page size, which CAP.MPSMIN says is 4096.
fn mdts(config: &RegistryConfig) -> u8 {
    pages_shift(config.io_limits.mdts_bytes)
}

/// A size as a power of two in units of the minimum page size; 0 is no limit.
fn pages_shift(bytes: u32) -> u8 {
    let pages = (bytes / 4096).max(1);
    u8::try_from(pages.ilog2()).unwrap_or(0)
}

/// Most descriptors in a capsule (MSDBD): our list, if it fits into the in-capsule data whole, else one.
pub(super) fn msdbd(icd: u16) -> u8 {
    let most = if usize::from(icd) < MAX_KEYED * SGL_LEN { 1 } else { MAX_KEYED };
    u8::try_from(most).unwrap_or(1)
}

const INVALID_NAMESPACE: Refused = Refused::at(location::NSID, Status::INVALID_NAMESPACE.dnr());

const OZCS_READ_ACROSS_ZONES: u16 = 1;
const NMIC_SHARED: u8 = 1;
const NSFEAT_OPTPERF: u8 = 1 << 4;
const DLFEAT_READS_ZERO: u8 = 1;
const DLFEAT_WRITE_ZEROES_DEALLOCATES: u8 = 1 << 3;
const NSFEAT_ROTATIONAL: u8 = 1 << 4;
const NSFEAT_NO_VOLATILE_WRITE_CACHE: u8 = 1 << 5;
const NSTAT_READY: u8 = 1;

const CMIC_MULTIPLE_PORTS: u8 = 1;
const CMIC_MULTIPLE_CONTROLLERS: u8 = 1 << 1;
const CMIC_ANA: u8 = 1 << 3;
const ANACAP_ALL_STATES: u8 = 0x1f;
const CTRATT_HOSTID_128: u32 = 1;
const CTRATT_TBKAS: u32 = 1 << 6;
const FRMW_ONE_READ_ONLY_SLOT: u8 = 1 | 1 << 1;
const LPA_COMMAND_EFFECTS: u8 = 1 << 1;
const LPA_EXTENDED_DATA: u8 = 1 << 2;
const LPA_MISCELLANEOUS: u8 = 1 << 5;
const ONCS_COMPARE: u16 = 1;
const ONCS_DATASET_MANAGEMENT: u16 = 1 << 2;
const ONCS_WRITE_ZEROES: u16 = 1 << 3;
const ONCS_SAVE_AND_SELECT: u16 = 1 << 4;
const ONCS_RESERVATIONS: u16 = 1 << 5;
const ONCS_VERIFY: u16 = 1 << 7;
const ONCS_COPY: u16 = 1 << 8;
const FUSES_COMPARE_AND_WRITE: u16 = 1;
const OCFS_FORMAT_0: u16 = 1;
const NWPC_WRITE_PROTECT: u8 = 1;
const NWPC_UNTIL_POWER_CYCLE: u8 = 1 << 1;
const VWC_PRESENT: u8 = 1;
const VWC_NO_BROADCAST: u8 = 2 << 1;
const SGLS_SUPPORTED: u32 = 1;
const SGLS_KEYED: u32 = 1 << 2;
const SGLS_LONGER_THAN_DATA: u32 = 1 << 18;
const SGLS_OFFSET: u32 = 1 << 20;
const OFCS_DISCONNECT: u16 = 1;
const DCTYPE_DIRECT: u8 = 1;
