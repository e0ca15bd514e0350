package deployment

import (
	"maps"
	"slices"
	"strconv"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/dunlin-project/dunlin/controlplane/controllers/history"
	"github.com/dunlin-project/dunlin/manifests"
)

// sameTemplate compares templates apart from the hash label.
func sameTemplate(a, b *corev1.PodTemplateSpec) bool {
	return apiequality.Semantic.DeepEqual(a.Spec, b.Spec) &&
		apiequality.Semantic.DeepEqual(bare(&a.ObjectMeta), bare(&b.ObjectMeta))
}

func bare(m *metav1.ObjectMeta) metav1.ObjectMeta {
	c := *m
	if _, ok := c.Labels[appsv1.DefaultDeploymentUniqueLabelKey]; ok {
		c.Labels = maps.Clone(c.Labels)
		delete(c.Labels, appsv1.DefaultDeploymentUniqueLabelKey)
	}
	return c
}

// split finds the set that has the Deployment's template (the oldest, if
// several do); the others are old.
func split(d *appsv1.Deployment, sets []*appsv1.ReplicaSet) (newRS *appsv1.ReplicaSet, old []*appsv1.ReplicaSet) {
	sets = slices.Clone(sets)
	slices.SortFunc(sets, byCreation)
	for _, rs := range sets {
		if newRS == nil && sameTemplate(&rs.Spec.Template, &d.Spec.Template) {
			newRS = rs
			continue
		}
		old = append(old, rs)
	}
	return newRS, old
}

func revision(annotations map[string]string) int64 {
	n, err := strconv.ParseInt(annotations[revisionAnnotation], 10, 64)
	if err != nil {
		return 0 // none yet, or edited by hand: counts as the oldest
	}
	return n
}

func nextRevision(old []*appsv1.ReplicaSet) int64 {
	var n int64
	for _, rs := range old {
		n = max(n, revision(rs.Annotations))
	}
	return n + 1
}

// notInherited are the Deployment's annotations that its sets do not get.
var notInherited = map[string]bool{
	corev1.LastAppliedConfigAnnotation:    true,
	revisionAnnotation:                    true,
	revisionHistoryAnnotation:             true,
	desiredAnnotation:                     true,
	maxAnnotation:                         true,
	appsv1.DeprecatedRollbackTo:           true,
	"deprecated.deployment.rollback.info": true,
	manifests.AnnotationAutoRollback:      true,
	manifests.AnnotationRolledBack:        true,
	manifests.AnnotationIgnoredOwners:     true,
	manifests.AnnotationGoodRevision:      true, // kubectl rollout undo copies a set's to the Deployment
}

// annotate gives the set the Deployment's annotations and its revision. A
// set that becomes the newest again keeps its earlier numbers in the history.
// It reports whether anything changed. set is changed in place.
func annotate(d *appsv1.Deployment, set *appsv1.ReplicaSet, rev int64, existed bool) bool {
	changed := false
	if set.Annotations == nil {
		set.Annotations = map[string]string{}
	}
	for k, v := range d.Annotations {
		if old, ok := set.Annotations[k]; !notInherited[k] && (!ok || old != v) {
			set.Annotations[k] = v
			changed = true
		}
	}
	before, had := set.Annotations[revisionAnnotation]
	if had && revision(set.Annotations) >= rev {
		return changed
	}
	set.Annotations[revisionAnnotation] = strconv.FormatInt(rev, 10)
	if had && before != "" && revision(map[string]string{revisionAnnotation: before}) > 0 {
		history := strings.Split(set.Annotations[revisionHistoryAnnotation], ",")
		if history[0] == "" {
			history = nil
		}
		history = append(history, before)
		set.Annotations[revisionHistoryAnnotation] = clipHistory(history)
	}
	if !existed {
		setReplicaAnnotations(d, set)
	}
	return true
}

// clipHistory drops the oldest numbers beyond 2,000 bytes.
func clipHistory(h []string) string {
	s := strings.Join(h, ",")
	for len(s) > 2000 && len(h) > 1 {
		h = h[1:]
		s = strings.Join(h, ",")
	}
	return s
}

// setReplicaAnnotations notes what the set's size was computed from, and
// reports whether that changed.
func setReplicaAnnotations(d *appsv1.Deployment, set *appsv1.ReplicaSet) bool {
	want := map[string]string{
		desiredAnnotation: strconv.Itoa(int(wanted(d))),
		maxAnnotation:     strconv.Itoa(int(maxReplicas(d))),
	}
	changed := false
	if set.Annotations == nil {
		set.Annotations = map[string]string{}
	}
	for k, v := range want {
		if set.Annotations[k] != v {
			set.Annotations[k] = v
			changed = true
		}
	}
	return changed
}

// newSet is the ReplicaSet of the Deployment's template; its size is still 0.
func newSet(d *appsv1.Deployment, rev int64) (*appsv1.ReplicaSet, error) {
	hash, err := history.HashTemplate(&d.Spec.Template, d.Status.CollisionCount)
	if err != nil {
		return nil, err
	}
	t := d.Spec.Template.DeepCopy()
	t.Labels = withLabel(t.Labels, appsv1.DefaultDeploymentUniqueLabelKey, hash)
	sel := d.Spec.Selector.DeepCopy()
	sel.MatchLabels = withLabel(sel.MatchLabels, appsv1.DefaultDeploymentUniqueLabelKey, hash)
	zero := int32(0)
	rs := &appsv1.ReplicaSet{
		ObjectMeta: metav1.ObjectMeta{
			Name: d.Name + "-" + hash, Namespace: d.Namespace, Labels: maps.Clone(t.Labels),
			OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(d, appsv1.SchemeGroupVersion.WithKind("Deployment"))},
		},
		Spec: appsv1.ReplicaSetSpec{Replicas: &zero, MinReadySeconds: minReady(d), Selector: sel, Template: *t},
	}
	annotate(d, rs, rev, false)
	return rs, nil
}

func withLabel(m map[string]string, k, v string) map[string]string {
	out := maps.Clone(m)
	if out == nil {
		out = map[string]string{}
	}
	out[k] = v
	return out
}

// surplus are the old sets beyond the history limit that may go: empty, and
// seen to be by their controller.
func surplus(d *appsv1.Deployment, old []*appsv1.ReplicaSet) (out []*appsv1.ReplicaSet) {
	if d.Spec.RevisionHistoryLimit == nil {
		return nil
	}
	var live []*appsv1.ReplicaSet
	for _, rs := range old {
		if rs.DeletionTimestamp == nil {
			live = append(live, rs)
		}
	}
	if on, _ := wantsRollback(d); on {
		// What could be gone back to stays, whatever the limit says.
		if good := lastGood(live); good != nil {
			live = without(live, good)
		}
	}
	n := len(live) - int(*d.Spec.RevisionHistoryLimit)
	if n <= 0 {
		return nil
	}
	slices.SortStableFunc(live, func(a, b *appsv1.ReplicaSet) int {
		return int(revision(a.Annotations) - revision(b.Annotations))
	})
	for _, rs := range live[:n] {
		if rs.Status.Replicas == 0 && replicas(rs.Spec.Replicas) == 0 && rs.Generation <= rs.Status.ObservedGeneration {
			out = append(out, rs)
		}
	}
	return out
}
