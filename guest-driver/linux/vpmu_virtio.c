// SPDX-License-Identifier: GPL-2.0
/*
 * The virtio device: what is there at probe and gone after remove.
 */
#include <linux/cpuhotplug.h>
#include <linux/io.h>
#include <linux/module.h>
#include <linux/rcupdate.h>
#include <linux/scatterlist.h>
#include <linux/slab.h>
#include <linux/virtio_config.h>

#include "compat.h"
#include "vpmu.h"
#include "vpmu_persistent.h"
#include "vpmu_ring.h"

/* Bounds on what the device says of itself, so that no size below can overflow. */
#define MAX_CATALOGUE	4096
#define MAX_VCPUS	4096

static enum cpuhp_state vpmu_online_state;
/* One: the PMU's name, /dev/vpmu and the task pages are there once. */
static atomic_t vpmu_present = ATOMIC_INIT(0);

/**
 * vpmu_device_get() - keep the device from going
 * @dev: the device
 */
void vpmu_device_get(struct vpmu_device *dev)
{
	atomic_inc(&dev->users);
}

/**
 * vpmu_device_put() - let it go
 * @dev: the device
 */
void vpmu_device_put(struct vpmu_device *dev)
{
	if (atomic_dec_and_test(&dev->users))
		wake_up_all(&dev->idle);
}

/*
 * Nothing opens the device any more, and all that was open is closed, when this
 * returns.
 */
static void device_drain(struct vpmu_device *dev)
{
	WRITE_ONCE(dev->gone, true);
	/* Either this sees the user that vpmu_pmu_event_init() adds, or that sees @gone. */
	smp_mb();
	wait_event(dev->idle, !atomic_read(&dev->users));
	/*
	 * The last user may still be about to wake this up, and perf core looks at the
	 * PMU once more behind pmu->destroy(). Neither sleeps on the way out, but both
	 * can be preempted there. An interrupt that was a user cannot.
	 */
	synchronize_rcu_tasks();
	synchronize_rcu();
}

static int notices_post(struct vpmu_device *dev, struct vpmu_notice *notice)
{
	struct scatterlist sg;

	sg_init_one(&sg, notice, sizeof(*notice));
	return virtqueue_add_inbuf(dev->event_vq, &sg, 1, notice, GFP_ATOMIC);
}

/**
 * vpmu_notices_take() - act on what the device has told
 * @dev: the device
 *
 * What another CPU takes meanwhile has been acted on, too, when this returns.
 *
 * Return: true if there was anything.
 */
bool vpmu_notices_take(struct vpmu_device *dev)
{
	struct virtqueue *vq = dev->event_vq;
	struct vpmu_notice *notice;
	unsigned long flags;
	bool taken = false;
	unsigned int len;

	spin_lock_irqsave(&dev->event_lock, flags);
	do {
		virtqueue_disable_cb(vq);
		while ((notice = virtqueue_get_buf(vq, &len))) {
			if (len >= sizeof(*notice))
				vpmu_output_notice(dev, notice);
			notices_post(dev, notice);
			taken = true;
		}
	} while (!virtqueue_enable_cb(vq));
	/* With none posted a kick would be an exit for nothing. */
	if (taken)
		virtqueue_kick(vq);
	spin_unlock_irqrestore(&dev->event_lock, flags);
	return taken;
}

static void notices_callback(struct virtqueue *vq)
{
	vpmu_notices_take(vq->vdev->priv);
}

static int device_info(struct vpmu_device *dev)
{
	struct virtio_device *vdev = dev->vdev;
	struct vpmu_info *info = &dev->info;
	u16 shift;

	virtio_cread_le(vdev, struct vpmu_config, version, &info->version);
	virtio_cread_le(vdev, struct vpmu_config, vcpus, &info->vcpus);
	virtio_cread_le(vdev, struct vpmu_config, max_events, &info->max_events);
	virtio_cread_le(vdev, struct vpmu_config, max_ring_pages, &info->max_ring_pages);
	virtio_cread_le(vdev, struct vpmu_config, catalogue_len, &info->catalogue_len);
	virtio_cread_le(vdev, struct vpmu_config, count_mode, &info->count_mode);
	virtio_cread_le(vdev, struct vpmu_config, time_zero, &info->time_zero);
	virtio_cread_le(vdev, struct vpmu_config, time_mult, &info->time_mult);
	virtio_cread_le(vdev, struct vpmu_config, time_shift, &shift);
	virtio_cread_le(vdev, struct vpmu_config, tsc_khz, &info->tsc_khz);
	virtio_cread_le(vdev, struct vpmu_config, max_sample_rate, &info->max_sample_rate);
	if (virtio_has_feature(vdev, VPMU_F_AUX))
		virtio_cread_le(vdev, struct vpmu_config, max_aux_pages, &info->max_aux_pages);
	virtio_cread_le(vdev, struct vpmu_config, max_persistent, &info->max_persistent);
	info->time_shift = shift;

	if (info->version != VPMU_VERSION) {
		dev_err(&vdev->dev, "the device speaks version %u, this driver version %u\n",
			info->version, VPMU_VERSION);
		return -EINVAL;
	}
	if (!info->vcpus || info->vcpus > MAX_VCPUS || info->catalogue_len > MAX_CATALOGUE) {
		dev_err(&vdev->dev, "senseless configuration: %u vCPUs, %u catalogue entries\n",
			info->vcpus, info->catalogue_len);
		return -EINVAL;
	}
	/* The device gets guest-physical addresses of pages. */
	if (virtio_has_feature(vdev, VIRTIO_F_ACCESS_PLATFORM)) {
		dev_err(&vdev->dev, "not supported behind an IOMMU\n");
		return -EOPNOTSUPP;
	}
	return 0;
}

static int device_queues(struct vpmu_device *dev)
{
	unsigned int i, count = VPMU_QUEUE_VCPU + dev->info.vcpus;
	vq_callback_t **callbacks;
	struct virtqueue **vqs;
	const char **names;
	int err = -ENOMEM;

	vqs = kcalloc(count, sizeof(*vqs), GFP_KERNEL);
	callbacks = kcalloc(count, sizeof(*callbacks), GFP_KERNEL);
	names = kcalloc(count, sizeof(*names), GFP_KERNEL);
	if (!vqs || !callbacks || !names)
		goto free;
	for (i = 0; i < count; i++)
		names[i] = "vcpu";
	names[VPMU_QUEUE_CONTROL] = "control";
	callbacks[VPMU_QUEUE_CONTROL] = vpmu_control_callback;
	names[VPMU_QUEUE_EVENT] = "event";
	callbacks[VPMU_QUEUE_EVENT] = notices_callback;

	err = vpmu_find_vqs(dev->vdev, count, vqs, callbacks, names);
	if (err)
		goto free;
	dev->control = vqs[VPMU_QUEUE_CONTROL];
	dev->event_vq = vqs[VPMU_QUEUE_EVENT];
	for (i = 0; i < dev->info.vcpus && !err; i++) {
		dev->vcpus[i].vq = vqs[VPMU_QUEUE_VCPU + i];
		err = vpmu_vcpu_init(&dev->vcpus[i], dev, i);
	}
free:
	kfree(names);
	kfree(callbacks);
	kfree(vqs);
	return err;
}

static void device_free(struct vpmu_device *dev)
{
	u32 i;

	vpmu_permission_exit(dev);
	if (dev->vcpus)
		for (i = 0; i < dev->info.vcpus && dev->vcpus[i].dev; i++)
			vpmu_vcpu_exit(&dev->vcpus[i]);
	xa_destroy(&dev->files);
	xa_destroy(&dev->traces);
	xa_destroy(&dev->sampled);
	free_percpu(dev->cpu_vcpu);
	kfree(dev->vcpus);
	kfree(dev->notices);
	kvfree(dev->catalogue);
	kfree(dev);
}

static struct vpmu_device *device_alloc(struct virtio_device *vdev)
{
	struct vpmu_device *dev;

	dev = kzalloc(sizeof(*dev), GFP_KERNEL);
	if (!dev)
		return ERR_PTR(-ENOMEM);
	dev->vdev = vdev;
	vdev->priv = dev;
	spin_lock_init(&dev->control_lock);
	INIT_LIST_HEAD(&dev->control_sent);
	INIT_LIST_HEAD(&dev->control_waiting);
	mutex_init(&dev->output_lock);
	mutex_init(&dev->link_lock);
	spin_lock_init(&dev->event_lock);
	spin_lock_init(&dev->notice_lock);
	xa_init_flags(&dev->files, XA_FLAGS_LOCK_IRQ);
	xa_init_flags(&dev->traces, XA_FLAGS_LOCK_IRQ);
	xa_init_flags(&dev->sampled, XA_FLAGS_LOCK_IRQ);
	init_waitqueue_head(&dev->idle);
	vpmu_persistent_init(dev);
	return dev;
}

/* What needs the configuration space to know its size. */
static int device_arrays(struct vpmu_device *dev)
{
	dev->vcpus = kcalloc(dev->info.vcpus, sizeof(*dev->vcpus), GFP_KERNEL);
	dev->notices = kcalloc(VPMU_NOTICES, sizeof(*dev->notices), GFP_KERNEL);
	dev->catalogue = kvcalloc(dev->info.catalogue_len, sizeof(*dev->catalogue), GFP_KERNEL);
	dev->cpu_vcpu = alloc_percpu(struct vpmu_vcpu *);
	if (!dev->vcpus || !dev->notices || !dev->catalogue || !dev->cpu_vcpu)
		return -ENOMEM;
	return 0;
}

static int device_doorbell(struct vpmu_device *dev)
{
	struct virtio_shm_region region;

	if (!virtio_has_feature(dev->vdev, VPMU_F_DOORBELL))
		return 0;
	if (!virtio_get_shm_region(dev->vdev, &region, VPMU_SHM_DOORBELL) ||
	    region.len < sizeof(u32)) {
		dev_err(&dev->vdev->dev, "the doorbell is offered but not there\n");
		return -ENXIO;
	}
	/* Programs get pages of which nothing belongs to anything else. */
	if (region.len >= PAGE_SIZE && PAGE_ALIGNED(region.addr))
		dev->doorbell_page = region.addr;
	dev->doorbell = ioremap(region.addr, region.len);
	return dev->doorbell ? 0 : -ENOMEM;
}

static void notices_start(struct vpmu_device *dev)
{
	unsigned int i;

	/* A queue shorter than the array takes what fits. */
	for (i = 0; i < VPMU_NOTICES; i++)
		if (notices_post(dev, &dev->notices[i]))
			break;
	virtqueue_kick(dev->event_vq);
}

static int vpmu_online(unsigned int cpu, struct hlist_node *node)
{
	struct vpmu_device *dev = hlist_entry_safe(node, struct vpmu_device, node);
	int err = vpmu_vcpu_discover(dev);

	/* A CPU without a queue is still a CPU: events on it are refused, it is not. */
	if (err)
		dev_err(&dev->vdev->dev, "CPU %u: nothing can be counted on it (%d)\n", cpu, err);
	else
		vpmu_task_online(dev, cpu);
	return 0;
}

static int vpmu_probe(struct virtio_device *vdev)
{
	struct vpmu_device *dev;
	int err;

	if (atomic_cmpxchg(&vpmu_present, 0, 1)) {
		dev_err(&vdev->dev, "there is a virtio PMU already\n");
		return -EBUSY;
	}
	dev = device_alloc(vdev);
	if (IS_ERR(dev)) {
		err = PTR_ERR(dev);
		goto absent;
	}
	err = device_info(dev);
	if (err)
		goto free;
	err = device_arrays(dev);
	if (err)
		goto free;
	err = device_queues(dev);
	if (err)
		goto reset;
	err = vpmu_task_init(dev, vpmu_switch_init());
	if (err)
		goto reset;

	virtio_device_ready(vdev);
	notices_start(dev);
	err = vpmu_control_catalogue(dev);
	if (err)
		goto reset;
	err = device_doorbell(dev);
	if (err)
		goto reset;
	err = vpmu_window_init(dev);
	if (err)
		goto reset;
	err = cpuhp_state_add_instance(vpmu_online_state, &dev->node);
	if (err)
		goto reset;
	err = vpmu_pmu_register(dev);
	if (err)
		goto offline;
	err = vpmu_trace_register(dev);
	if (err)
		goto unregister;
	err = vpmu_persistent_register(dev);
	if (err)
		goto untrace;
	vpmu_permission_init(dev);
	err = vpmu_cdev_register(dev);
	if (err)
		goto forget;
	dev_info(&vdev->dev, "%u vCPUs, %u events to choose from\n",
		 dev->info.vcpus, dev->info.catalogue_len);
	return 0;

forget:
	vpmu_persistent_close(dev);
	device_drain(dev);
	vpmu_persistent_unregister(dev);
untrace:
	device_drain(dev);
	vpmu_trace_unregister(dev);
unregister:
	device_drain(dev);
	vpmu_pmu_unregister(dev);
offline:
	cpuhp_state_remove_instance(vpmu_online_state, &dev->node);
reset:
	virtio_reset_device(vdev);
	vpmu_control_exit(dev);
	vpmu_persistent_exit(dev);
	vdev->config->del_vqs(vdev);
	if (dev->doorbell)
		iounmap(dev->doorbell);
	vpmu_window_exit(dev);
	vpmu_task_exit(dev);
free:
	device_free(dev);
absent:
	atomic_set(&vpmu_present, 0);
	return err;
}

static void vpmu_remove(struct virtio_device *vdev)
{
	struct vpmu_device *dev = vdev->priv;

	/*
	 * The module cannot be unloaded while an event or /dev/vpmu is open, but the
	 * transport can be taken away. Then this waits until they are closed.
	 */
	vpmu_cdev_unregister(dev);
	vpmu_persistent_close(dev);
	device_drain(dev);
	vpmu_persistent_unregister(dev);
	vpmu_trace_unregister(dev);
	vpmu_pmu_unregister(dev);
	cpuhp_state_remove_instance(vpmu_online_state, &dev->node);

	virtio_reset_device(vdev);
	vpmu_control_exit(dev);
	vpmu_persistent_exit(dev);
	vdev->config->del_vqs(vdev);
	if (dev->doorbell)
		iounmap(dev->doorbell);
	vpmu_window_exit(dev);
	vpmu_task_exit(dev);
	device_free(dev);
	atomic_set(&vpmu_present, 0);
}

static const unsigned int vpmu_features[] = {
	VPMU_F_RING,
	VPMU_F_TASK_PAGE,
	VPMU_F_DOORBELL,
	VPMU_F_AUX,
	VPMU_F_WINDOW,
};

static const struct virtio_device_id vpmu_ids[] = {
	{ VPMU_DEVICE_ID, VIRTIO_DEV_ANY_ID },
	{ },
};
MODULE_DEVICE_TABLE(virtio, vpmu_ids);

static struct virtio_driver vpmu_driver = {
	.driver = {
		.name = "virtio_pmu",
		.owner = THIS_MODULE,
		/* Unbinding by hand would only wait for open events; see vpmu_remove(). */
		.suppress_bind_attrs = true,
	},
	.id_table = vpmu_ids,
	.feature_table = vpmu_features,
	.feature_table_size = ARRAY_SIZE(vpmu_features),
	.probe = vpmu_probe,
	.remove = vpmu_remove,
};

static int __init vpmu_init(void)
{
	int ret;

	ret = cpuhp_setup_state_multi(CPUHP_AP_ONLINE_DYN, "perf/virtio_pmu:online",
				      vpmu_online, NULL);
	if (ret < 0)
		return ret;
	vpmu_online_state = ret;
	ret = register_virtio_driver(&vpmu_driver);
	if (ret)
		cpuhp_remove_multi_state(vpmu_online_state);
	return ret;
}
module_init(vpmu_init);

static void __exit vpmu_exit(void)
{
	unregister_virtio_driver(&vpmu_driver);
	cpuhp_remove_multi_state(vpmu_online_state);
}
module_exit(vpmu_exit);

MODULE_DESCRIPTION("Paravirtual PMU");
MODULE_LICENSE("GPL");
