// SPDX-License-Identifier: GPL-2.0
/*
 * Maps the AUX areas of perf core's rings on the device, and takes their pages
 * back.
 *
 * perf core allocates and frees the area. The device identifies the area by the
 * event through which the area was mapped. That event may be closed before the
 * area is freed. vpmu_trace.c decides when a trace writes to the area. The
 * areas of /dev/vpmu are in vpmu_aux.c.
 */
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/perf_event.h>
#include <linux/slab.h>

#include "perf_core_private.h"
#include "vpmu.h"
#include "vpmu_event.h"
#include "vpmu_trace.h"

/**
 * vpmu_area_setup() - struct pmu::setup_aux: pass an area's pages to the device
 * @event: the event through which the area is mapped
 * @pages: addresses of the pages, which perf core keeps until vpmu_area_free()
 * @count: number of pages
 * @overwrite: the reader does not move the tail, so new data overwrites old
 *
 * Sleeps, like any mmap(2).
 *
 * Return: the area, or NULL.
 */
void *vpmu_area_setup(struct perf_event *event, void **pages, int count, bool overwrite)
{
	struct vpmu_event *own = event->pmu_private;
	struct vpmu_device *dev = own->dev;
	struct vpmu_area *area;
	struct page **list;
	u32 flags = VPMU_MAP_DRIVER_OWNED;
	int i;

	if (count > dev->info.max_aux_pages || own->trace->area)
		return NULL;
	area = kzalloc(sizeof(*area), GFP_KERNEL);
	list = kvmalloc_array(count, sizeof(*list), GFP_KERNEL);
	if (!area || !list)
		goto free;
	for (i = 0; i < count; i++)
		list[i] = virt_to_page(pages[i]);
	if (!overwrite)
		flags |= VPMU_MAP_WRITABLE;
	if (vpmu_control_map_aux(dev, own->id, list, count, flags))
		goto free;
	kvfree(list);

	*area = (struct vpmu_area) {
		.dev = dev,
		.owner = own,
		.pages = pages,
		.count = count,
		.overwrite = overwrite,
	};
	/*
	 * Hold references on the module and the device until vpmu_area_free():
	 * the area can outlive its event, because another event that shares the
	 * ring may have mapped the area, too.
	 */
	__module_get(THIS_MODULE);
	vpmu_device_get(dev);
	mutex_lock(&dev->output_lock);
	own->trace->area = area;
	WRITE_ONCE(own->trace->buffer, perf_core_buffer(event));
	mutex_unlock(&dev->output_lock);
	return area;
free:
	kvfree(list);
	kfree(area);
	return NULL;
}

/**
 * vpmu_area_free() - struct pmu::free_aux: take the pages back from the device
 * @aux: the return value of vpmu_area_setup()
 *
 * Perf core calls this once no trace writes to the area.
 */
void vpmu_area_free(void *aux)
{
	struct vpmu_area *area = aux;
	struct vpmu_device *dev = area->dev;
	struct vpmu_event *own;
	u32 i;

	mutex_lock(&dev->output_lock);
	own = area->owner;
	if (own) {
		WRITE_ONCE(own->trace->buffer, NULL);
		own->trace->area = NULL;
		area->kept = own->id ? vpmu_control_unmap_aux(dev, own->id) : 0;
	}
	mutex_unlock(&dev->output_lock);
	if (area->kept) {
		vpmu_err(dev, "the device keeps an AUX area: %u pages are lost\n",
			 area->count);
		for (i = 0; i < area->count; i++)
			get_page(virt_to_page(area->pages[i]));
	}
	kfree(area);
	vpmu_device_put(dev);
	module_put(THIS_MODULE);
}

/**
 * vpmu_area_close() - close a trace on the device, which also unmaps its area
 * @own: the trace's event; perf core no longer schedules it
 */
void vpmu_area_close(struct vpmu_event *own)
{
	struct vpmu_device *dev = own->dev;
	struct vpmu_area *area;
	int err = 0;

	mutex_lock(&dev->output_lock);
	area = own->trace->area;
	if (own->id)
		err = vpmu_control_close(dev, own->id);
	if (area) {
		area->owner = NULL;
		area->kept = err;
	}
	mutex_unlock(&dev->output_lock);
}
